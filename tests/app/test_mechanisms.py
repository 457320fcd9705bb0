"""The sessions of hives over other mechanisms than bubblewrap: the same workspaces, whatever holds the sandbox."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.app.lodgings import apiary_of
from tests.docker.daemon import Daemon, new_daemon
from tests.workspace.conftest import make_snapshot

from skep.app.program import open_program
from skep.app.reception import open_sessions
from skep.app.residence import THREAD
from skep.config import Paths, Settings
from skep.errors import SandboxLost, WorkspaceBusy
from skep.sandbox.erase import erase
from skep.sandbox.mechanisms import usable
from skep.workspace.workspace import Workspace

needs_runsc = pytest.mark.skipif(not usable("gvisor").usable, reason="no runsc here: sudo apt-get install runsc")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    make_snapshot(folder)
    yield folder
    erase(str(folder), folder.stat().st_ino)


@pytest.fixture
def engine() -> Iterator[Daemon]:
    daemon = new_daemon()
    yield daemon
    daemon.remove()


def opened(home: Path, **sandbox: Any) -> Any:
    paths = Paths(config=home / "config.json", home=home, logs=home / "log")
    return open_program(paths, Settings.model_validate({"sandbox": sandbox}))


@needs_runsc
async def test_a_workspace_goes_from_one_kernel_to_another_and_back_to_a_checkpoint(home: Path) -> None:
    async with opened(home, mechanism="gvisor") as program, open_sessions(program) as sessions:
        await program.accounts.create("bees")
        hive = await program.hives.create("garden", account_id="bees", actor="test")
        computer = await sessions.resolve(hive, THREAD, account_id="bees")
        assert "Linux version 4.4.0" in (await computer.run("cat /proc/version; echo sown > bed")).text
        workspace = sessions.running()[0].held
        assert isinstance(workspace, Workspace)
        await workspace.checkpoint("kept")
        await computer.run("echo trampled > bed")
        await workspace.rollback("kept")
        computer = await sessions.resolve(hive, THREAD, account_id="bees")
        assert (await computer.run("cat bed")).text == "sown\n"
        hive = await program.hives.configure(
            "garden", {"sandbox_mechanism": "bubblewrap"}, account_id="bees", actor="test"
        )
        held = sessions.running()[0].held
        assert held is not None
        await held.stop()
        computer = await sessions.resolve(hive, THREAD, account_id="bees")
        assert "4.4.0" not in (found := (await computer.run("cat bed /proc/version; echo more >> bed")).text)
        assert found.startswith("sown\n")


@needs_runsc
async def test_memory_that_cannot_be_shown_is_copied_anew_and_what_is_done_to_the_copy_stays_there(home: Path) -> None:
    async with opened(home, mechanism="gvisor") as program:
        await program.accounts.create("bees")
        hive = await program.hives.create("garden", account_id="bees", actor="test")
        memory = home / "hives" / hive.id / "MEMORY.md"
        for spoil in (
            "rm -rf hive; echo false > hive",
            "chmod 000 hive",
            "rm hive/MEMORY.md; ln -s /etc hive/memory/x",
        ):
            async with open_sessions(program) as sessions:
                computer = await sessions.resolve(hive, THREAD, account_id="bees")
                assert (await computer.run("cat hive/MEMORY.md")).text == memory.read_text()
                await computer.run(spoil)
        assert memory.read_text().startswith("# Memory of garden")


@needs_runsc
async def test_a_second_process_joins_the_sandbox_of_the_first(home: Path) -> None:
    async with opened(home, mechanism="gvisor") as program, open_sessions(program) as sessions:
        await program.accounts.create("bees")
        hive = await program.hives.create("garden", account_id="bees", actor="test")
        computer = await sessions.resolve(hive, THREAD, account_id="bees")
        apiary = apiary_of(sessions)
        (workspace_id,) = apiary.ids()
        async with apiary.enter(workspace_id) as sandbox:
            await sandbox.run("echo sown > bed; touch /tmp/here")
        assert (await computer.run("cat bed; ls /tmp/here")).text == "sown\n/tmp/here\n"


@needs_runsc
async def test_a_sandbox_that_runs_with_less_isolation_than_is_demanded_by_now_is_replaced_and_not_joined(
    home: Path,
) -> None:
    async with opened(home) as program, open_sessions(program) as first, open_sessions(program) as second:
        await program.accounts.create("bees")
        hive = await program.hives.create("garden", account_id="bees", actor="test")
        await (await first.resolve(hive, THREAD, account_id="bees")).run("echo sown > bed")
        more = {"sandbox_mechanism": "gvisor", "sandbox_isolation": "kernel"}
        hive = await program.hives.configure("garden", more, account_id="bees", actor="test")
        with pytest.raises(WorkspaceBusy, match="less isolation than its hive demands"):
            await second.resolve(hive, THREAD, account_id="bees")
        computer = await first.resolve(hive, THREAD, account_id="bees")
        assert "Linux version 4.4.0" in (await computer.run("cat /proc/version bed")).text


@pytest.mark.service
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_session_in_a_container_comes_back_after_its_engine_was_restarted(
    home: Path, engine: Daemon, end: signal.Signals
) -> None:
    async with opened(home, mechanism="docker", docker=engine.options) as program, open_sessions(program) as sessions:
        await program.accounts.create("bees")
        hive = await program.hives.create("garden", account_id="bees", actor="test")
        computer = await sessions.resolve(hive, THREAD, account_id="bees")
        await computer.run("echo sown > bed")
        running = asyncio.create_task(computer.run("sleep 60"))
        await computer.run("true")
        stopping = asyncio.create_task(asyncio.to_thread(engine.stop, end))
        with pytest.raises(SandboxLost):
            await running
        await stopping
        await asyncio.to_thread(engine.start)
        computer = await sessions.resolve(hive, THREAD, account_id="bees")
        assert (await computer.run("cat bed")).text == "sown\n"
