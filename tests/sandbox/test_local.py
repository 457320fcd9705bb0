"""The mechanism without isolation: what it refuses, what it says, and that it touches nothing but its own.

Commands here are harmless: they run on this machine as this user. The contract runs in tests/contracts/test_local.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.programs import started

from skep.errors import Denied, InvalidRequest
from skep.sandbox.egress.network import Network
from skep.sandbox.interpreter import Interpreter
from skep.sandbox.local import CAUTION, LocalSandbox
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount, Stack
from skep.testing.promise import eventually

ALLOWED = {"allow_unsafe": True}


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with Sandbox.create(tmp_path / "work", mechanism="local", options=ALLOWED) as made:
        yield made


@pytest.mark.parametrize(
    "options", [{}, {"allow_unsafe": False}, {"allow_unsafe": 1}, {"allow_unsafe": "yes"}], ids=str
)
async def test_it_does_not_start_unless_that_is_allowed(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Denied) as denied:
        await Sandbox.create(tmp_path / "work", mechanism="local", options=options)
    assert "sandbox.allow_unsafe" in (denied.value.hint or "")
    assert not (tmp_path / "work").exists()


ASKED: dict[str, dict[str, Any]] = {
    "network": {"network": Network()},
    "stack": {"stack": Stack("/nowhere/tree", "/nowhere/work")},
    "mounts": {"mounts": [Mount("/etc", "/opt/etc")]},
    "read_only": {"read_only": {"/etc": "/opt/etc"}},
    "option": {"options": {**ALLOWED, "image": "debian"}},
}


@pytest.mark.parametrize("name", ASKED)
async def test_what_it_cannot_provide_is_refused_and_not_left_out(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await Sandbox.create(**{"mechanism": "local", "options": ALLOWED, **ASKED[name]})
    assert refused.value.hint


async def test_it_says_each_time_that_nothing_is_isolated(caplog: pytest.LogCaptureFixture) -> None:
    for times in (1, 2):
        async with Sandbox.create(mechanism="local", options=ALLOWED) as sandbox:
            assert isinstance(sandbox, LocalSandbox) and sandbox.caution == CAUTION
        said = [record for record in caplog.records if record.name == "skep.sandbox.local"]
        assert len(said) == times and said[-1].levelno == logging.WARNING
        assert "isolates nothing" in said[-1].getMessage()


async def test_the_workspace_is_the_folder_and_other_paths_are_the_machines(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.files.write("relative", b"1")
    await sandbox.files.write("/workspace/below/absolute", b"2")
    await sandbox.files.write(str(tmp_path / "outside"), b"3")
    assert (tmp_path / "work/relative").read_bytes() == b"1"
    assert (tmp_path / "work/below/absolute").read_bytes() == b"2"
    assert (tmp_path / "outside").read_bytes() == b"3"
    for cwd in ("below", "/workspace/below", str(tmp_path / "work/below")):
        assert (await sandbox.run("pwd; cat absolute", cwd=cwd)).text == f"{tmp_path}/work/below\n2"


async def test_commands_do_not_see_the_controllers_environment(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SKEP_TEST_SECRET", "of the controller")
    async with Sandbox.create(mechanism="local", options=ALLOWED) as late:
        for one in (sandbox, late):
            assert "SKEP_TEST_SECRET" not in (await one.run("env; tr '\\0' '\\n' < /proc/$PPID/environ")).text


async def test_a_folder_that_was_made_for_it_goes_with_it_and_one_that_was_given_stays(tmp_path: Path) -> None:
    async with Sandbox.create(mechanism="local", options=ALLOWED) as sandbox:
        made = [Path(sandbox.home), Path(sandbox.cache)]
        await sandbox.run("mkdir -p shut/deep; touch shut/deep/file; chmod 000 shut")
        assert all(place.is_dir() for place in made)
    assert not any(place.exists() for place in made)
    async with Sandbox.create(tmp_path / "kept", mechanism="local", options=ALLOWED) as sandbox:
        await sandbox.files.write("file", b"1")
    assert (tmp_path / "kept/file").read_bytes() == b"1"


async def test_it_halts_and_ends_its_own_processes_and_nobody_elses(sandbox: Sandbox) -> None:
    with started(["sleep", "1000"]) as neighbour:
        try:
            job = await sandbox.background("setsid sleep 1000 & exec sleep 1000")
            await sandbox.pause()
            assert _state(job.process.pid) == "T" and _state(neighbour.pid) == "S"
            await sandbox.resume()
            await sandbox.kill_all()
            assert (await job.wait()).signal == signal.SIGKILL
            assert not await sandbox.occupied()
            assert neighbour.poll() is None and _state(neighbour.pid) == "S"
        finally:
            neighbour.kill()


async def test_cells_run_with_the_kernels_of_this_machine(sandbox: Sandbox) -> None:
    async with Interpreter(sandbox) as interpreter:
        assert "42" in str((await interpreter.run("6 * 7")).results)


async def test_a_server_inside_is_one_of_this_machine(sandbox: Sandbox) -> None:
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        with await sandbox.connect(port) as visit:
            assert await asyncio.get_running_loop().sock_recv(visit, 10) == b""


CONTROLLER = """
import asyncio, json, sys
from skep import Sandbox

async def main():
    sandbox = await Sandbox.create(sys.argv[1], mechanism="local", options={"allow_unsafe": True})
    daemon = "setsid sh -c 'trap \\"\\" TERM HUP INT; echo $$ > daemon; while :; do sleep 1; done' &"
    job = await sandbox.background(daemon + " exec sleep 1000")
    while not (await sandbox.run("cat daemon")).stdout:
        pass
    pids = [job.process.pid, int(await sandbox.files.read("daemon")), sandbox.housing.pid]
    print(json.dumps(pids), flush=True)
    await job.wait()

asyncio.run(main())
"""


async def test_everything_ends_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path / "work")]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as controller:
        assert controller.stdout is not None
        pids = json.loads(await asyncio.to_thread(controller.stdout.readline))
        assert all(_state(pid) is not None for pid in pids)

    async def nobody() -> bool:
        return all(_state(pid) in (None, "Z") for pid in pids)

    await eventually(nobody)


def _state(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2]
