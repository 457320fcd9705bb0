"""A Docker engine that stops, restarts or is killed takes its sandboxes along, and no wait outlasts it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docker.daemon import Daemon, new_daemon
from tests.programs import started

from skep.errors import SandboxLost, SandboxUnusable
from skep.sandbox.docker import DockerSandbox
from skep.sandbox.leftovers import sweep
from skep.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.service
SOON_S = 2.0
GONE_S = 20.0

CONTROLLER = """
import asyncio, sys
from skep import Sandbox

async def main():
    options = {"host": sys.argv[1]}
    async with Sandbox.create(sys.argv[2], mechanism="docker", options=options, labels={"session": "s1"}) as sandbox:
        process = await sandbox.start("trap '' TERM HUP INT; echo started > mark; while :; do sleep 0.1; done")
        while not (await sandbox.run("test -s mark")).ok:
            pass
        print(sandbox.id, flush=True)
        await process.wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Daemon]:
    """Give an engine that the tests here may end."""
    daemon = new_daemon()
    yield daemon
    daemon.remove()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "workspace")


def sandbox_in(folder: str, engine: Daemon) -> Any:
    return Sandbox.create(folder, mechanism="docker", options=engine.options)


def ended_by(number: int) -> Callable[[Daemon], None]:
    return lambda engine: engine.stop(number)


def restarted(engine: Daemon) -> None:
    engine.stop()
    engine.start()


ENDS = {"stopped": ended_by(signal.SIGTERM), "restarted": restarted, "killed": ended_by(signal.SIGKILL)}


async def waited_for(process: Any) -> object:
    return await process.wait()


@pytest.mark.parametrize("how", ENDS)
async def test_waits_end_with_the_engine_and_the_next_sandbox_finds_its_files(
    engine: Daemon, folder: str, how: str
) -> None:
    sandbox = await sandbox_in(folder, engine)
    assert isinstance(sandbox, DockerSandbox)
    await sandbox.files.write("kept", b"1")
    process = await sandbox.start("trap '' TERM HUP INT; while :; do sleep 1; done")
    shell = await sandbox.shell()
    waits = [
        asyncio.ensure_future(wait)
        for wait in (waited_for(process), sandbox.run("yes", timeout_s=100), shell.run("sleep 100"))
    ]
    pidfd = os.dup(sandbox.container.pidfd)
    await sandbox.run("true")
    await asyncio.to_thread(ENDS[how], engine)
    for wait in waits:
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(wait, SOON_S)
    with pytest.raises(SandboxLost):
        await sandbox.run("true")
    assert not await sandbox.alive()
    process.release()
    await sandbox.stop()
    await asyncio.to_thread(has_ended, pidfd)
    if not engine.answers():
        with pytest.raises(SandboxUnusable, match="no Docker engine answers"):
            await sandbox_in(folder, engine)
        await asyncio.to_thread(engine.start)
    async with sandbox_in(folder, engine) as again:
        assert (await again.run("cat kept")).stdout == b"1"
    await asyncio.to_thread(eventually, lambda: containers(engine) == [], GONE_S)


async def test_a_container_that_is_removed_under_a_command_is_lost(engine: Daemon, folder: str) -> None:
    sandbox = await sandbox_in(folder, engine)
    waiting = asyncio.ensure_future(sandbox.run("sleep 100"))
    await sandbox.run("true")
    with api_of(engine) as api:
        await asyncio.to_thread(api.remove_container, f"skep-{sandbox.id}", force=True)
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(waiting, SOON_S)
    await sandbox.stop()


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8])
async def test_a_start_that_is_given_up_leaves_no_container(engine: Daemon, folder: str, after_s: float) -> None:
    starting = asyncio.ensure_future(sandbox_in(folder, engine)._start())
    await asyncio.wait([starting], timeout=after_s)
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled():
        await starting.result().stop()
    await asyncio.to_thread(eventually, lambda: containers(engine) == [], GONE_S)


async def test_other_sandboxes_outlive_one_that_is_lost(engine: Daemon, tmp_path: Path) -> None:
    async with sandbox_in(str(tmp_path / "one"), engine) as one, sandbox_in(str(tmp_path / "two"), engine) as two:
        signal.pidfd_send_signal(one.container.pidfd, signal.SIGKILL)
        await asyncio.wait_for(one.gone(), SOON_S)
        assert (await two.run("echo fine")).stdout == b"fine\n"


def test_a_controller_that_is_killed_leaves_no_container(engine: Daemon, folder: str) -> None:
    with started(
        [sys.executable, "-c", CONTROLLER, engine.host, folder], stdout=subprocess.PIPE, text=True
    ) as controller:
        assert controller.stdout is not None
        sandbox_id = controller.stdout.readline().strip()
        (found,) = containers(engine)
        assert found["Labels"]["skep.sandbox"] == sandbox_id
        assert found["Labels"]["skep.session"] == "s1"
        with api_of(engine) as api:
            pidfd = os.pidfd_open(api.inspect_container(found["Id"])["State"]["Pid"])
        private = Path(tempfile.gettempdir(), f"skep-workspace-{sandbox_id}")
        assert private.is_dir()
        controller.kill()
        controller.wait()
    has_ended(pidfd)
    eventually(lambda: containers(engine) == [], GONE_S)
    eventually(lambda: sweep() is not None and not private.exists(), GONE_S)
    with Sandbox.create(folder, mechanism="docker", options=engine.options) as again:
        assert again.files.read("mark") == b"started\n"


def api_of(engine: Daemon) -> Any:
    from contextlib import closing

    from docker import APIClient

    return closing(APIClient(base_url=engine.host, version="auto"))


def containers(engine: Daemon) -> list[dict[str, Any]]:
    with api_of(engine) as api:
        found = api.containers(all=True, filters={"label": "skep.sandbox"})
    return list(json.loads(json.dumps(found)))


def has_ended(pidfd: int) -> None:
    """Wait for the end of everything inside a container, by its first process."""
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ready = poll.poll(SOON_S * 1000)
    os.close(pidfd)
    assert ready, "it still runs"


def eventually(holds: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not so after {within_s} s"
        time.sleep(0.02)
