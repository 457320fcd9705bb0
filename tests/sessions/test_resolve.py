"""A key leads to one computer, always the same, however many ask and whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.sessions.yard import ACCOUNT, Yard, inside, open_yard, prepare_hive, remove, seen, signal_inside

from skep.errors import Conflict, SandboxLost, WorkspaceBusy, WorkspaceDamaged
from skep.sessions import putting_away
from skep.sessions.computer import Computer
from skep.sessions.recovery import Pace


@pytest.fixture
async def yard(home: Path, ready_url: str) -> AsyncIterator[Yard]:
    await prepare_hive(ready_url, threads="thread")
    async with open_yard(home, ready_url) as yard:
        yield yard


async def test_a_first_use_makes_a_computer_and_the_next_ones_find_it(yard: Yard) -> None:
    computer = await yard.resolve()
    assert (await computer.run("echo kept > work")).ok
    assert (await (await yard.resolve()).run("cat work")).text == "kept\n"
    session = await yard.session()
    assert (session.status, session.generation, session.host) == ("active", 1, yard.ledger.host)
    assert session.healthy_at is not None and session.active_at >= session.created_at
    assert await yard.steps() == [(None, "creating"), ("creating", "active")]
    assert yard.apiary.ids() == [session.id]


async def test_threads_of_a_hive_share_one_computer_unless_it_says_otherwise(home: Path, ready_url: str) -> None:
    await prepare_hive(ready_url)
    async with open_yard(home, ready_url) as yard:
        await (await yard.resolve("slack:C1:1700.1")).run("echo shared > work")
        assert (await (await yard.resolve("dm:U7")).run("cat work")).text == "shared\n"
        assert len(await yard.ledger.list()) == 1


async def test_threads_that_have_a_computer_each_see_nothing_of_each_other(yard: Yard) -> None:
    await (await yard.resolve("dm:U7")).run("echo mine > work")
    assert not (await (await yard.resolve("dm:U8")).run("cat work")).ok
    assert len(await yard.ledger.list()) == 2


async def test_a_key_that_is_hostile_touches_nothing_but_its_own_computer(yard: Yard) -> None:
    before = {path.name for path in yard.home.parent.iterdir()}
    for key in (
        "api:../../escape",
        "api:; rm -rf /",
        "api:%00/etc",
        "api:'; DROP TABLE skep_sessions; --",
        "api:\u0430",
    ):
        assert (await (await yard.resolve(key)).run("true")).ok
    assert len(await yard.ledger.list()) == 5
    assert {path.name for path in yard.home.parent.iterdir()} == before
    assert {path.name for path in (yard.home / "workspaces").iterdir() if path.is_dir()} == {
        session.id for session in await yard.ledger.list()
    }


async def test_many_that_ask_for_one_key_at_once_get_one_computer(yard: Yard) -> None:
    computers = await asyncio.gather(*(yard.resolve() for _ in range(50)))
    await asyncio.gather(*(computer.run(f"touch f{number}") for number, computer in enumerate(computers)))
    assert len((await (await yard.resolve()).run("ls -d f*")).text.split()) == 50
    assert len(inside(yard.hive.id)) == 1
    assert (await yard.session()).generation == 1


async def test_many_keys_at_once_get_a_computer_each(yard: Yard) -> None:
    threads = [f"api:{number}" for number in range(12)]
    computers = await asyncio.gather(*map(yard.resolve, threads))
    await asyncio.gather(*(one.run(f"echo {key} > key") for key, one in zip(threads, computers, strict=True)))
    texts = [(await (await yard.resolve(thread)).run("cat key")).text for thread in threads]
    assert texts == [f"{thread}\n" for thread in threads]
    assert len(inside(yard.hive.id)) == 12


async def test_work_is_done_once_more_after_the_computer_was_lost_and_came_back(yard: Yard) -> None:
    tries: list[Computer] = []

    async def work(computer: Computer) -> str:
        tries.append(computer)
        await computer.run(f"echo {len(tries)} >> tries")
        if len(tries) == 1:
            signal_inside(yard.hive.id, signal.SIGKILL)
            await computer.run("sleep 60")
        return (await computer.run("cat tries")).text

    done = await yard.sessions.attempt(yard.hive, "cli:x", work, account_id=ACCOUNT)
    assert done == "1\n2\n" and len(tries) == 2
    assert (await yard.session("cli:x")).generation == 2


async def test_work_is_done_once_more_and_never_a_third_time(yard: Yard) -> None:
    tries: list[Computer] = []

    async def work(computer: Computer) -> None:
        tries.append(computer)
        signal_inside(yard.hive.id, signal.SIGKILL)
        await computer.run("sleep 60")

    with pytest.raises(SandboxLost):
        await yard.sessions.attempt(yard.hive, "cli:x", work, account_id=ACCOUNT)
    assert len(tries) == 2


async def test_work_that_fails_by_itself_is_not_done_again(yard: Yard) -> None:
    tries: list[Computer] = []

    async def work(computer: Computer) -> None:
        tries.append(computer)
        raise Conflict("no", hint="none")

    with pytest.raises(Conflict):
        await yard.sessions.attempt(yard.hive, "cli:x", work, account_id=ACCOUNT)
    assert len(tries) == 1


async def test_work_is_not_tried_again_when_the_computer_does_not_come_back(yard: Yard) -> None:
    tries: list[Computer] = []

    async def work(computer: Computer) -> None:
        tries.append(computer)
        for tree in yard.trees("cli:x"):
            remove(tree.parent)
        remove(yard.workspace("cli:x"))
        signal_inside(yard.hive.id, signal.SIGKILL)
        await computer.run("sleep 60")

    with pytest.raises(WorkspaceDamaged, match="missing"):
        await yard.sessions.attempt(yard.hive, "cli:x", work, account_id=ACCOUNT)
    assert len(tries) == 1


async def test_whoever_gives_up_waiting_leaves_the_session_to_others(home: Path, ready_url: str) -> None:
    await prepare_hive(ready_url, threads="thread")
    chance = random.Random(7)
    async with open_yard(home, ready_url) as one, open_yard(home, ready_url, pace=Pace(limit_s=10)) as other:
        await (await one.resolve()).run("echo kept > work")
        await putting_away.stop(one.sessions, one.id())
        for number in range(30):
            with suppress(TimeoutError):
                async with asyncio.timeout(chance.uniform(0, 0.06)):
                    await one.resolve()
                    if number % 2:
                        await putting_away.archive(one.sessions, one.id())
            computer = await other.resolve()
            assert (await computer.run("cat work")).text == "kept\n"
            assert len(inside(one.hive.id)) == 1
            await putting_away.stop(other.sessions, other.id())


async def test_a_process_of_the_same_host_joins_and_the_files_are_the_same(home: Path, ready_url: str) -> None:
    await prepare_hive(ready_url, threads="thread")
    async with open_yard(home, ready_url) as one, open_yard(home, ready_url) as other:
        await (await one.resolve()).run("echo one > one")
        computer = await other.resolve()
        await computer.run("echo other > other")
        assert await seen(await one.resolve()) == await seen(computer)
        assert len(inside(one.hive.id)) == 1
        live = other.sessions.live(other.id())
        assert live is not None and live.joined
        await one.kill()
        async with asyncio.timeout(30):
            await live.sandbox.gone()
        assert (await (await other.resolve()).run("cat one other")).text == "one\nother\n"
        assert len(inside(one.hive.id)) == 1


async def test_whoever_wants_a_computer_alone_is_told_who_has_it(home: Path, ready_url: str) -> None:
    await prepare_hive(ready_url, threads="thread")
    async with open_yard(home, ready_url) as one, open_yard(home, ready_url) as other:
        await one.resolve()
        with pytest.raises(WorkspaceBusy, match="in use by process"):
            await other.sessions.open(
                other.hive, other.sessions.wanted(other.hive, "cli:default"), account_id=ACCOUNT, join=False
            )


async def test_a_session_can_be_stopped_from_another_process_while_it_is_being_made(home: Path, ready_url: str) -> None:
    await prepare_hive(ready_url, threads="thread")
    async with open_yard(home, ready_url) as one, open_yard(home, ready_url) as other:
        making = asyncio.create_task(one.resolve())
        async with asyncio.timeout(30):
            while await other.ledger.find(other.id()) is None:
                await asyncio.sleep(0.001)
            stopped = await putting_away.stop(other.sessions, other.id())
        await making
        assert stopped.status == "stopped" and not inside(one.hive.id)
