"""gVisor as a runtime of a Docker engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.docker.daemon import Daemon
from tests.docker.runsc import RunscDaemon, engine

from skep.errors import SandboxLost, SandboxUnusable
from skep.sandbox.creation import Creation
from skep.sandbox.gvisor.engine import Container
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stream import StreamSandbox

__all__ = ["engine"]

SOON_S = 2.0
CONTROLLER = """
import asyncio, sys
from skep.sandbox.sandbox import Sandbox

async def main():
    sandbox = await Sandbox.create(mechanism="gvisor", options={"engine": True, "host": sys.argv[1]})
    await sandbox.background("trap '' HUP TERM INT; while :; do sleep 0.01; done")
    print(sandbox.id, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def gvisor(engine: Daemon, folder: Path | None = None, **options: object) -> Creation:
    return Sandbox.create(folder, mechanism="gvisor", options={"engine": True, "host": engine.host, **options})


def containers(engine: Daemon, sandbox_id: str) -> list[dict[str, object]]:
    from docker import APIClient

    with contextlib.closing(APIClient(base_url=engine.host)) as api:
        found: list[dict[str, object]] = api.containers(all=True, filters={"label": f"skep.sandbox={sandbox_id}"})
        return found


async def test_commands_and_files_in_a_container_of_gvisors(engine: RunscDaemon, tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    async with gvisor(engine, folder) as sandbox:
        said = await sandbox.run("id -un; uname -r; cat > file; ls; touch /cache/mine", input=b"inside\n")
        assert said.ok
        name, release, listed = said.text.split()
        assert (name, listed) == ("agent", "file")
        assert release != os.uname().release
        assert (folder / "file").read_bytes() == await sandbox.files.read("file") == b"inside\n"
        assert (await sandbox.run("grep -c : /proc/net/dev; touch /new")).text == "1\n"
        (container,) = containers(engine, sandbox.id)
        assert container["State"] == "running"
    assert not containers(engine, sandbox.id)


async def test_a_container_that_is_killed_is_lost_soon(engine: RunscDaemon) -> None:
    sandbox = await gvisor(engine)
    waiting = asyncio.ensure_future(sandbox.run("sleep 1000"))
    await sandbox.run("true")
    assert isinstance(sandbox, StreamSandbox)
    house = sandbox.housing
    assert isinstance(house, Container)
    await house.engine.ask(lambda api: api.kill(house.name))
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(waiting, SOON_S)
    await sandbox.stop()
    assert not house.folder.path.exists()


def test_a_container_goes_with_its_controller(engine: RunscDaemon) -> None:
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, engine.host], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    sandbox_id = controller.stdout.readline().strip()
    assert containers(engine, sandbox_id)
    controller.send_signal(signal.SIGKILL)
    controller.communicate()
    deadline = time.monotonic() + 10
    while containers(engine, sandbox_id):
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_an_engine_without_the_runtime_says_how_to_add_it(engine: RunscDaemon) -> None:
    with pytest.raises(SandboxUnusable, match="no runtime 'other'") as refused:
        await gvisor(engine, runtime="other")
    assert "--network=none" in (refused.value.hint or "")
