"""Whoever asks for a session that is not theirs is refused and put on record; rooms say what is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update
from tests.sessions.yard import ACCOUNT, THREAD, Yard, open_yard, prepare_hive

from skep.app.lodgings import labels
from skep.errors import Denied, SandboxLost
from skep.sessions import putting_away
from skep.sessions.computer import Computer
from skep.state.accounts import Accounts
from skep.state.events import AccessDenied, RoomReplaced
from skep.state.hives import Hives
from skep.state.schema import hives, sessions
from skep.workspace import manifest as manifests


@pytest.fixture
async def yard(home: Path, ready_sqlite_url: str) -> AsyncIterator[Yard]:
    await prepare_hive(ready_sqlite_url, threads="thread")
    async with open_yard(home, ready_sqlite_url) as yard:
        await Accounts(yard.database).create("wasps")
        yield yard


async def denied(yard: Yard) -> list[tuple[str, str]]:
    recorded = await yard.log.page(yard.hive.id, types=["access_denied"])
    return [(one.event.asked_by, one.event.act) for one in recorded if isinstance(one.event, AccessDenied)]


async def run(computer: Computer) -> object:
    return await computer.run("true")


async def start(computer: Computer) -> object:
    return await computer.start("true")


async def background(computer: Computer) -> object:
    return await computer.background("true")


async def read(computer: Computer) -> object:
    async with computer.files() as files:
        return await files.read("note")


async def use(computer: Computer) -> object:
    async with computer.sandbox() as sandbox:
        return await sandbox.alive()


async def open_shell(computer: Computer) -> object:
    return await computer.shell()


async def open_context(computer: Computer) -> object:
    return await computer.context()


CALLS = {
    "exec": [run, start, background, open_shell, open_context],
    "files": [read],
    "use": [use],
}
EVERY_CALL = [(act, call) for act, calls in CALLS.items() for call in calls]


async def move(yard: Yard) -> None:
    """Give the hive and its sessions to another account, as nothing in Skep does."""
    async with yard.database.write() as connection:
        await connection.execute(update(hives).values(account_id="wasps"))
        await connection.execute(update(sessions).values(account_id="wasps"))


async def remove(yard: Yard) -> None:
    await Hives(yard.database, yard.log).delete("garden", account_id=ACCOUNT, actor="me")


async def test_a_session_is_resolved_for_its_own_account_alone(yard: Yard) -> None:
    with pytest.raises(Denied, match="wasps"):
        await yard.sessions.resolve(yard.hive, THREAD, account_id="wasps")
    assert await denied(yard) == [("wasps", "resolve")]
    assert await yard.ledger.find(yard.id()) is None and not yard.workspace().exists()
    assert (await (await yard.resolve()).run("true")).ok
    with pytest.raises(Denied):
        await yard.sessions.resolve(yard.hive, THREAD, account_id="wasps")
    assert await denied(yard) == [("wasps", "resolve")] * 2


async def test_a_hive_that_says_it_is_another_account_s_is_looked_up(yard: Yard) -> None:
    forged = replace(yard.hive, account_id="wasps")
    with pytest.raises(Denied):
        await yard.sessions.resolve(forged, THREAD, account_id="wasps")
    assert await denied(yard) == [("wasps", "resolve")]


@pytest.mark.parametrize("away", [move, remove])
@pytest.mark.parametrize(("act", "call"), EVERY_CALL)
async def test_a_computer_that_was_kept_is_of_no_use_when_its_hive_is_another_s_or_gone(
    yard: Yard, act: str, call: Callable[[Computer], Awaitable[object]], away: Callable[[Yard], Awaitable[None]]
) -> None:
    computer = await yard.resolve()
    async with computer.files() as files:
        await files.write("note", b"ours")
    await call(computer)  # it works as long as it is theirs
    assert await denied(yard) == []
    await away(yard)
    with pytest.raises(Denied):
        await call(computer)
    assert await denied(yard) == [(ACCOUNT, act)]
    with pytest.raises(Denied):
        await yard.resolve()


async def test_a_shell_and_a_context_that_were_kept_are_checked_with_every_command(yard: Yard) -> None:
    computer = await yard.resolve()
    shell, context = await computer.shell(), await computer.context()
    assert (await shell.run("echo in")).text == "in\n"
    assert (await context.run("1")).outcome == "ok"
    await remove(yard)
    with pytest.raises(Denied):
        await shell.run("echo in")
    with pytest.raises(Denied):
        await context.run("1")
    assert await denied(yard) == [(ACCOUNT, "exec")] * 2


async def test_a_computer_that_was_kept_past_a_take_over_is_of_no_use(yard: Yard) -> None:
    computer = await yard.resolve()
    async with yard.database.write() as connection:
        await connection.execute(update(sessions).values(token=sessions.c.token + 1))
    with pytest.raises(SandboxLost, match="another process"):
        await computer.run("true")


async def test_a_workspace_says_whose_it_is_and_so_does_one_that_comes_back(yard: Yard) -> None:
    await yard.resolve()
    session = await yard.session()
    assert yard.apiary.workspaces.show(yard.id()).labels == labels(session)
    assert labels(session) == {"account": ACCOUNT, "hive": yard.hive.id, "session": yard.id()}
    await putting_away.archive(yard.sessions, yard.id())
    await putting_away.restore(yard.sessions, yard.id())
    assert yard.apiary.workspaces.show(yard.id()).labels == labels(session)


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def rename_in(folder: Path, workspace_id: str, **changes: object) -> None:
    """Make the manifest in a folder say another id, with a hash that fits, as somebody would who means it."""
    found = manifests.read(folder)
    manifests.write(folder, found.model_copy(update={"id": workspace_id, **changes}))


async def written(yard: Yard) -> tuple[str, str]:
    """Give two threads a workspace each, with a word in it, and put both away."""
    mine, theirs = "cli:mine", "cli:theirs"
    for thread in (mine, theirs):
        await (await yard.resolve(thread)).run(f"echo {thread} >note")
        await putting_away.stop(yard.sessions, yard.id(thread))
    return mine, theirs


@pytest.mark.parametrize("forged", [False, True])
async def test_of_two_workspaces_that_were_swapped_neither_is_used_for_the_other(yard: Yard, forged: bool) -> None:
    mine, theirs = await written(yard)
    swap(yard.workspace(mine), yard.workspace(theirs))
    if forged:
        for thread in (mine, theirs):
            rename_in(yard.workspace(thread), yard.id(thread))
    for thread in (mine, theirs):
        with pytest.raises(Denied, match="another session"):
            await yard.resolve(thread)
        assert (await yard.session(thread)).status == "error"
    assert await denied(yard) == [(ACCOUNT, "hold")] * 2
    for act in (putting_away.archive, putting_away.delete):
        with pytest.raises(Denied):
            await act(yard.sessions, yard.id(mine))
    swap(yard.workspace(mine), yard.workspace(theirs))
    if forged:
        for thread in (mine, theirs):
            rename_in(yard.workspace(thread), yard.id(thread))
    assert (await (await yard.resolve(theirs)).run("cat note")).text == "cli:theirs\n"


async def test_without_labels_a_swapped_workspace_would_be_used(yard: Yard) -> None:
    mine, theirs = await written(yard)
    swap(yard.workspace(mine), yard.workspace(theirs))
    for thread in (mine, theirs):
        rename_in(yard.workspace(thread), yard.id(thread), labels={})
    assert (await (await yard.resolve(mine)).run("cat note")).text == "cli:theirs\n"


async def lose(yard: Yard, computer: Computer) -> None:
    """End the sandbox under the session."""
    async with computer.sandbox() as sandbox:
        await sandbox.stop()


async def replaced(yard: Yard) -> list[tuple[str, str]]:
    recorded = await yard.log.page(yard.hive.id, types=["room_replaced"])
    return [(one.event.kind, one.event.name) for one in recorded if isinstance(one.event, RoomReplaced)]


async def test_a_shell_that_went_with_its_sandbox_is_replaced_and_the_caller_is_told(yard: Yard) -> None:
    computer = await yard.resolve()
    shell = await computer.shell()
    assert not shell.replaced
    await shell.run("word=kept; cd output")
    same = await computer.shell()
    assert not same.replaced and (await same.run("echo $word; pwd")).text == "kept\n/workspace/output\n"
    await lose(yard, computer)
    with pytest.raises(SandboxLost):
        await shell.run("echo $word")
    computer = await yard.resolve()
    fresh = await computer.shell()
    assert fresh.replaced and (await fresh.run("echo [$word]; pwd")).text == "[]\n/workspace\n"
    assert await replaced(yard) == [("shell", "main")]
    assert not (await computer.shell()).replaced
    assert not (await computer.shell("another")).replaced
    assert await replaced(yard) == [("shell", "main")]


async def test_a_context_that_went_with_its_sandbox_is_replaced_and_its_next_cell_says_so(yard: Yard) -> None:
    computer = await yard.resolve()
    context = await computer.context("sums")
    await context.run("word = 'kept'")
    assert (await (await computer.context("sums")).run("print(word)")).stdout == "kept\n"
    await lose(yard, computer)
    computer = await yard.resolve()
    fresh = await computer.context("sums")
    cell = await fresh.run("print(word)")
    assert fresh.replaced and cell.outcome == "error" and cell.restarted and "gone" in cell.note
    assert await replaced(yard) == [("context", "sums")]


async def test_a_shell_is_replaced_after_a_stop_and_by_another_process_too(
    yard: Yard, home: Path, ready_sqlite_url: str
) -> None:
    await (await (await yard.resolve()).shell()).run("word=kept")
    await putting_away.stop(yard.sessions, yard.id())
    async with open_yard(home, ready_sqlite_url) as other:
        fresh = await (await other.resolve()).shell()
        assert fresh.replaced and (await fresh.run("echo [$word]")).text == "[]\n"
    assert await replaced(yard) == [("shell", "main")]


async def test_a_session_that_is_halted_goes_on_with_the_next_call(yard: Yard) -> None:
    computer = await yard.resolve()
    await putting_away.pause(yard.sessions, yard.id())
    assert (await computer.run("echo on", timeout_s=10)).text == "on\n"
    assert (await yard.session()).status == "active"
