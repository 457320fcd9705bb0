"""A session that is stopped, packed away or brought back is the same afterwards; one that is deleted is gone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.sessions.yard import THREAD, Yard, inside, open_yard, prepare_hive, remove, seen, signal_inside

from skep.errors import Conflict, NotFound, SandboxLost, SkepError
from skep.sessions import putting_away

CYCLES = 50


@pytest.fixture
async def yard(home: Path, ready_url: str) -> AsyncIterator[Yard]:
    await prepare_hive(ready_url, threads="thread")
    async with open_yard(home, ready_url) as yard:
        yield yard


async def run(yard: Yard, command: str, thread: str = THREAD) -> str:
    ran = await (await yard.resolve(thread)).run(command)
    assert ran.ok, ran.error_text
    return ran.text


FURNISH = r"""
mkdir -p a/b/c empty && chmod 711 a/b && chmod 500 empty
head -c 70000 /dev/urandom > a/big && printf 'no line end' > a/b/c/small && : > a/nothing && : > 'a/a name; with $signs'
printf 'x' > "$(printf 'a/\303\244\t\n')" && chmod 400 a/nothing && chmod 755 a/big && ln a/big a/twin
ln -s /etc/passwd outside && ln -s nowhere dangling && ln -s a/b folder && ln -s loop loop
rm -r node_modules/small && rm .venv/bin/tool && mkdir .venv/bin/tool && echo over > pyproject.toml
touch -d '1970-01-02T03:04:05.123456789Z' a/big a/b/c && touch -h -d @1234567890.987654321 dangling
touch -d @253402300799 a/b/c/small && touch -d @0.000000001 a/b a empty
"""


@pytest.mark.timeout(300)
async def test_fifty_rounds_of_stopping_and_archiving_keep_every_byte_mode_time_and_link(
    home: Path, ready_sqlite_url: str
) -> None:
    await prepare_hive(ready_sqlite_url)
    async with open_yard(home, ready_sqlite_url) as yard:
        await run(yard, FURNISH)
        before = await seen(await yard.resolve())
        assert len(before) > 20
        for number in range(CYCLES):
            await putting_away.stop(yard.sessions, yard.id())
            await putting_away.archive(yard.sessions, yard.id())
            assert yard.apiary.ids() == []
            if number % 2:
                assert (await putting_away.restore(yard.sessions, yard.id())).status == "stopped"
            after = await seen(await yard.resolve())
            assert after == before, number
        assert (await yard.session()).generation == CYCLES + 1


async def test_what_is_seen_of_a_workspace_tells_a_byte_a_mode_a_time_and_a_link(yard: Yard) -> None:
    """Control: none of the things that fifty rounds are to keep could change unseen."""
    await run(yard, "echo one > file; ln -s one link; mkdir folder")
    before = await seen(await yard.resolve())
    for change in (
        "printf 'oNe\\n' > new; touch -r file new; cat new > /tmp/x; touch -r file /tmp/x; cat /tmp/x > file; "
        "touch -r /tmp/x file; rm new",
        "chmod 600 file",
        "touch -d @1 file",
        "ln -sfn two link",
        "touch -d @2 folder",
    ):
        await run(yard, change)
        after = await seen(await yard.resolve())
        assert after != before, change
        before = after


async def test_a_stopped_session_runs_nothing_and_belongs_to_nobody(yard: Yard) -> None:
    computer = await yard.resolve()
    await computer.background("sleep 1000")
    stopped = await putting_away.stop(yard.sessions, yard.id())
    assert (stopped.status, stopped.controller) == ("stopped", None)
    assert stopped == await yard.session() and not inside(yard.hive.id)
    with pytest.raises(SandboxLost):
        await computer.run("true")
    assert await putting_away.stop(yard.sessions, yard.id()) is not None  # once more does no harm
    assert (await yard.steps())[-1] == ("active", "stopped")


async def test_a_paused_session_goes_on_where_it_was_when_it_is_resolved(yard: Yard) -> None:
    computer = await yard.resolve()
    await computer.background("while :; do echo . >> ticks; sleep 0.01; done")
    await putting_away.pause(yard.sessions, yard.id())
    assert (await yard.session()).status == "paused"
    assert signal_inside(yard.hive.id, 0) > 0
    ticks = int(await run(yard, "wc -l < ticks"))
    async with asyncio.timeout(30):
        while int(await run(yard, "wc -l < ticks")) <= ticks:
            await asyncio.sleep(0.02)
    session = await yard.session()
    assert (session.status, session.generation) == ("active", 1)


async def test_only_a_computer_of_this_process_is_paused(yard: Yard) -> None:
    with pytest.raises(NotFound):
        await putting_away.pause(yard.sessions, yard.id())


async def test_an_archived_session_has_no_folder_and_comes_back_whole(yard: Yard) -> None:
    await run(yard, "echo kept > work")
    archived = await putting_away.archive(yard.sessions, yard.id())
    assert (archived.status, archived.controller) == ("archived", None) and archived.archive
    assert not yard.workspace().exists() and not list((yard.home / "trees").glob("[0-9a-f]*"))
    again = await putting_away.archive(yard.sessions, yard.id())
    assert (again.status, again.archive) == ("archived", archived.archive)
    restored = await putting_away.restore(yard.sessions, yard.id())
    assert restored.status == "stopped" and restored.unarchived_at is not None
    assert await run(yard, "cat work") == "kept\n"


async def test_what_is_not_archived_cannot_be_restored(yard: Yard) -> None:
    await run(yard, "echo kept > work")
    for _ in range(2):
        with pytest.raises(Conflict, match="not archived"):
            await putting_away.restore(yard.sessions, yard.id())
        await putting_away.stop(yard.sessions, yard.id())
    assert await run(yard, "cat work") == "kept\n"


async def test_a_session_that_is_not_on_record_cannot_be_put_away(yard: Yard) -> None:
    for put_away in (putting_away.stop, putting_away.archive, putting_away.restore, putting_away.delete):
        with pytest.raises(NotFound):
            await put_away(yard.sessions, yard.id())
    assert await yard.ledger.list() == ()


async def test_an_archive_that_cannot_be_written_costs_nothing(yard: Yard) -> None:
    await run(yard, "echo kept > work")
    (yard.home / "archives").write_text("in the way")
    with pytest.raises(SkepError):
        await putting_away.archive(yard.sessions, yard.id())
    session = await yard.session()
    assert (session.status, session.controller, session.archive) == ("stopped", None, None)
    assert await run(yard, "cat work") == "kept\n"


async def test_a_deleted_session_is_gone_with_its_archive_and_its_key_starts_empty(yard: Yard) -> None:
    await run(yard, "echo old > work")
    await putting_away.archive(yard.sessions, yard.id())
    await (await yard.resolve()).shell("main")
    deleted = await putting_away.delete(yard.sessions, yard.id())
    assert (deleted.status, deleted.archive, deleted.generation) == ("destroyed", None, 0)
    assert yard.apiary.ids() == [] and not await yard.apiary.archive().list(yard.id())
    assert await putting_away.delete(yard.sessions, yard.id()) is not None  # once more does no harm
    computer = await yard.resolve()
    assert "/workspace/work" not in await seen(computer)
    assert not (await computer.shell("main")).replaced
    assert (await yard.steps())[-2:] == [("destroyed", "creating"), ("creating", "active")]


async def test_a_session_that_is_archived_can_be_deleted_without_coming_back(yard: Yard) -> None:
    await run(yard, "echo old > work")
    await putting_away.archive(yard.sessions, yard.id())
    assert (await putting_away.delete(yard.sessions, yard.id())).status == "destroyed"
    assert not await yard.apiary.archive().list(yard.id())
    assert "/workspace/work" not in await seen(await yard.resolve())


@pytest.mark.parametrize("fault", ["trees", "manifest", "folder", "everything"])
async def test_no_damage_keeps_a_session_from_being_deleted(yard: Yard, fault: str) -> None:
    await run(yard, "echo old > work")
    await putting_away.stop(yard.sessions, yard.id())
    trees = yard.trees()
    if fault in ("trees", "everything"):
        for tree in trees:
            remove(tree.parent)
    if fault == "manifest":
        (yard.workspace() / "workspace.json").write_text("{")
    if fault in ("folder", "everything"):
        remove(yard.workspace())
    assert (await putting_away.delete(yard.sessions, yard.id())).status == "destroyed"
    assert "/workspace/work" not in await seen(await yard.resolve())
    assert await run(yard, "echo new > work; cat work") == "new\n"


async def test_a_hanging_computer_can_be_stopped(yard: Yard) -> None:
    await run(yard, "echo kept > work")
    signal_inside(yard.hive.id, signal.SIGSTOP)
    async with asyncio.timeout(30):
        await putting_away.stop(yard.sessions, yard.id())
    assert not inside(yard.hive.id)
    assert await run(yard, "cat work") == "kept\n"


async def test_the_end_of_a_process_ends_its_computers_and_leaves_their_sessions_to_others(
    home: Path, ready_url: str
) -> None:
    await prepare_hive(ready_url, threads="thread")
    async with open_yard(home, ready_url) as yard:
        for thread in ("cli:a", "cli:b"):
            await run(yard, f"echo {thread} > work", thread)
    assert not inside(yard.hive.id)
    async with open_yard(home, ready_url) as yard:
        assert {session.status for session in await yard.ledger.list()} == {"stopped"}
        assert [await run(yard, "cat work", thread) for thread in ("cli:a", "cli:b")] == ["cli:a\n", "cli:b\n"]
