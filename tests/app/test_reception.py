"""The sessions of a program: opened for a while, over real workspaces, and ended with the process that opened them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.workspace.conftest import make_snapshot

from skep.app.apiary import Apiary
from skep.app.lodgings import Extras
from skep.app.program import Program, open_program
from skep.app.reception import open_sessions
from skep.app.residence import THREAD, find
from skep.config import Paths, Settings
from skep.errors import WorkspaceBusy, WorkspaceDamaged
from skep.sandbox.erase import erase
from skep.sandbox.stack import Mount
from skep.sessions import putting_away
from skep.sessions.computer import Computer
from skep.sessions.key import hive_key, session_id
from skep.sessions.ledger import Roll
from skep.sessions.sessions import Sessions
from skep.state.events import WorkspaceCreated, WorkspaceRepaired
from skep.state.hives import Hive


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    make_snapshot(folder)
    yield folder
    erase(str(folder), folder.stat().st_ino)


@pytest.fixture
async def program(home: Path) -> AsyncIterator[Program]:
    paths = Paths(config=home / "config.json", home=home, logs=home / "log")
    async with open_program(paths, Settings()) as program:
        await program.accounts.create("bees")
        await program.hives.create("garden", account_id="bees", actor="test")
        yield program


async def hive_of(program: Program) -> Hive:
    return await program.hives.show("garden", account_id="bees")


@asynccontextmanager
async def resolved(program: Program, extras: Extras | None = None) -> AsyncIterator[tuple[Sessions, Computer]]:
    async with open_sessions(program, extras=extras) as sessions:
        yield sessions, await sessions.resolve(await hive_of(program), THREAD, account_id="bees")


async def run(program: Program, command: str) -> str:
    async with resolved(program) as (_, computer):
        return (await computer.run(command)).text


async def test_a_sandbox_ends_with_its_process_and_the_workspace_stays(program: Program) -> None:
    assert await run(program, "echo sown > bed; touch /tmp/mine") == ""
    assert await run(program, "cat bed; ls /tmp/mine 2>/dev/null || echo gone") == "sown\ngone\n"
    (session,) = await Roll(program.database).list()
    assert (session.status, session.controller, session.generation) == ("stopped", None, 2)
    (made,) = await program.log.page((await hive_of(program)).id, types=["workspace_created"])
    assert isinstance(made.event, WorkspaceCreated)


async def test_what_nobody_uses_is_stopped_while_the_program_goes_on(program: Program) -> None:
    await program.hives.configure("garden", {"stop_after_s": 1}, account_id="bees", actor="test")
    async with resolved(program) as (_, computer):
        await computer.run("echo sown > bed")
        async with asyncio.timeout(40):
            while [session.status for session in await Roll(program.database).list()] != ["stopped"]:
                await asyncio.sleep(0.1)
    assert await run(program, "cat bed") == "sown\n"


async def test_a_second_process_joins_and_the_first_waits_for_it(program: Program) -> None:
    async with open_sessions(program) as first:
        computer = await first.resolve(await hive_of(program), THREAD, account_id="bees")
        await computer.run("touch /tmp/mine")
        async with resolved(program) as (second, joined):
            assert (await joined.run("ls /tmp/mine")).text == "/tmp/mine\n"
            ending = asyncio.create_task(putting_away.stop_all(first))
            assert not (await asyncio.wait([ending], timeout=0.2))[0]
            assert (await joined.run("ls /tmp/mine")).text == "/tmp/mine\n"
            await putting_away.stop_all(second)
        await ending
    (session,) = await Roll(program.database).list()
    assert session.status == "stopped"


async def test_one_who_is_cancelled_waits_for_nobody(program: Program) -> None:
    up = asyncio.Event()

    async def hold() -> None:
        async with resolved(program):
            up.set()
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    await up.wait()
    async with resolved(program) as (_, computer):
        assert (await computer.run("true")).ok
        holder.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait([holder])
        assert holder.cancelled()


async def test_extras_are_had_by_the_first_and_refused_to_who_joins(program: Program, home: Path) -> None:
    shown = home / "shown"
    shown.mkdir()
    (shown / "note").write_text("hello\n")
    extras = Extras(mounts=(Mount(str(shown), "/workspace/shown"),))
    async with resolved(program, extras) as (_, computer):
        assert (await computer.run("cat shown/note")).text == "hello\n"
        async with resolved(program) as (_, plain):
            assert (await plain.run("cat shown/note")).text == "hello\n"
        with pytest.raises(WorkspaceBusy, match="settled until that ends"):
            async with resolved(program, extras):
                pass


async def test_a_workspace_from_before_is_taken_over_with_all_it_has(program: Program) -> None:
    hive, apiary = await hive_of(program), Apiary(program.paths, program.settings)
    async with open_sessions(program) as sessions:
        await apiary.create(hive.id)
        async with apiary.enter(hive.id) as sandbox:
            await sandbox.run("echo old > bed")
        async with apiary.workspaces.hold(hive.id):  # an older Skep that still runs
            with pytest.raises(WorkspaceBusy):
                await sessions.resolve(hive, THREAD, account_id="bees")
    assert await run(program, "cat bed") == "old\n"
    found = await find(program, apiary, "garden", "bees")
    assert found.id == session_id("bees", hive.id, hive_key(hive.id))
    assert [one.id for one in apiary.workspaces.list()] == [found.id]


async def test_threads_of_a_hive_share_a_workspace_or_have_one_each(program: Program) -> None:
    assert await run(program, "echo shared > bed") == ""
    await program.hives.configure("garden", {"threads": "thread"}, account_id="bees", actor="test")
    hive = await hive_of(program)
    async with open_sessions(program) as sessions:
        for thread in ("cli:one", "cli:two"):
            computer = await sessions.resolve(hive, thread, account_id="bees")
            assert (await computer.run(f"cat bed 2>/dev/null; echo {thread} > bed; cat bed")).text == f"{thread}\n"
    assert len(await Roll(program.database).list()) == 3


async def _repairs(program: Program) -> list[WorkspaceRepaired]:
    recorded = await program.log.page((await hive_of(program)).id, types=["workspace_repaired"])
    return [one.event for one in recorded if isinstance(one.event, WorkspaceRepaired)]


def _lose_all_trees(home: Path) -> None:
    for tree in (home / "trees").iterdir():
        erase(str(tree), tree.stat().st_ino)


async def test_what_is_lost_is_brought_back_from_the_archive_and_the_loss_is_told(program: Program, home: Path) -> None:
    assert await run(program, "echo sown > bed") == ""
    (session,) = await Roll(program.database).list()
    async with open_sessions(program) as sessions:
        await putting_away.archive(sessions, session.id)
    assert await run(program, "cat bed; echo later > later") == "sown\n"
    _lose_all_trees(home)
    assert await run(program, "cat bed; ls later 2>/dev/null || echo gone") == "sown\ngone\n"
    (repaired,) = await _repairs(program)
    assert any("restored it from the archive" in deed for deed in repaired.done)
    assert any(told.startswith("everything since") for told in repaired.left)


async def test_without_archive_or_checkpoint_it_is_an_error_and_never_an_empty_workspace(
    program: Program, home: Path
) -> None:
    assert await run(program, "echo sown > bed") == ""
    _lose_all_trees(home)
    with pytest.raises(WorkspaceDamaged):
        await run(program, "true")
    (session,) = await Roll(program.database).list()
    assert (session.status, session.resume_fail_count) == ("error", 1)
    assert session.last_error


async def test_a_workspace_that_shows_other_folders_than_its_hives_is_put_right(program: Program) -> None:
    assert await run(program, "true") == ""
    (session,) = await Roll(program.database).list()
    async with Apiary(program.paths, program.settings).at(session.id).hold(session.id) as workspace:
        await workspace.amend(shown=())
    assert 'name = "garden"' in await run(program, "cat hive/.hive.toml")
