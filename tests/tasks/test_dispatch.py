"""Which task runs when: in order in each thread, and no tenant before another."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert, update
from tests.tasks.conftest import Open, until

from skep.errors import InvalidRequest, LimitReached, NotFound, ThreadBusy
from skep.state.accounts import Accounts
from skep.state.database import Database
from skep.state.hives import Hive, Hives
from skep.state.log import EventLog
from skep.state.schema import tasks as rows
from skep.tasks.engine import Pace
from skep.tasks.run import Outcome, Run
from skep.tasks.submission import new_row
from skep.tasks.task import Task
from skep.tasks.tasks import Tasks


class Gate:
    """Holds the tasks that are asked to stay until they are let go; keeps the order in which they began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open = asyncio.Event()

    async def carry(self, run: Run) -> Outcome:
        self.begun.append(run.task.prompt)
        if run.task.prompt.startswith("stay"):
            await self.open.wait()
        return Outcome("succeeded", "done", reply=run.task.prompt)


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def status(tasks: Tasks, task: Task) -> str:
    return (await tasks.show(task.id, account_id=task.account_id)).status


async def ended(tasks: Tasks, task: Task) -> Task:
    return await tasks.wait(task.id, account_id=task.account_id, timeout_s=20)


async def configured(hives: Hives, hive: Hive, choice: str) -> Hive:
    return await hives.configure(hive.id, {"same_thread": choice}, account_id=hive.account_id, actor="me")


async def test_a_busy_thread_lets_the_next_prompt_wait(worker: Open, hive: Hive, gate: Gate) -> None:
    async with worker(gate.carry) as one:
        first = await one.tasks.submit(hive, "stay", actor="me")
        await until(lambda: gate.begun == ["stay"])
        second = await one.tasks.submit(hive, "second", actor="me")
        third = await one.tasks.submit(hive, "third", actor="me")
        other = await one.tasks.submit(hive, "other", thread="cli:other", actor="me")
        assert (await ended(one.tasks, other)).status == "succeeded"
        assert [await status(one.tasks, task) for task in (second, third)] == ["waiting", "waiting"]
        gate.open.set()
        assert [(await ended(one.tasks, task)).status for task in (first, second, third)] == ["succeeded"] * 3
    assert gate.begun == ["stay", "other", "second", "third"]


async def test_a_prompt_of_a_clock_that_is_behind_waits_for_those_that_were_taken_before(
    worker: Open, hive: Hive, gate: Gate, database: Database, log: EventLog
) -> None:
    behind = Tasks(database, log)
    behind.ledger.now = lambda: datetime.now(UTC) - timedelta(hours=1)
    async with worker(gate.carry) as one:
        first = await one.tasks.submit(hive, "stay", actor="me")
        await until(lambda: gate.begun == ["stay"])
        second = await behind.submit(hive, "second", actor="me")
        other = await one.tasks.submit(hive, "other", thread="cli:other", actor="me")
        await ended(one.tasks, other)
        assert gate.begun == ["stay", "other"]
        gate.open.set()
        await ended(one.tasks, second)
        third = await behind.submit(hive, "third", actor="me")
    assert gate.begun == ["stay", "other", "second"]
    assert first.created_at < second.created_at < third.created_at


async def test_a_busy_thread_can_refuse_the_next_prompt(worker: Open, hive: Hive, hives: Hives, gate: Gate) -> None:
    hive = await configured(hives, hive, "reject")
    async with worker(gate.carry) as one:
        first = await one.tasks.submit(hive, "stay", actor="me")
        with pytest.raises(ThreadBusy):
            await one.tasks.submit(hive, "second", actor="me")
        gate.open.set()
        await ended(one.tasks, first)
        assert (await ended(one.tasks, await one.tasks.submit(hive, "third", actor="me"))).status == "succeeded"


async def test_a_busy_thread_can_be_interrupted(worker: Open, hive: Hive, hives: Hives, gate: Gate) -> None:
    hive = await configured(hives, hive, "interrupt")
    async with worker(gate.carry) as one:
        first = await one.tasks.submit(hive, "stay", actor="me")
        await until(lambda: gate.begun == ["stay"])
        second = await one.tasks.submit(hive, "second", actor="me")
        assert (await ended(one.tasks, second)).status == "succeeded"
        assert (await ended(one.tasks, first)).status == "cancelled"
    assert gate.begun == ["stay", "second"]


async def test_the_backlog_of_one_tenant_does_not_hold_up_another(
    worker: Open, hive: Hive, hives: Hives, gate: Gate, database: Database
) -> None:
    await Accounts(database).create("wasps")
    nest = await hives.create("nest", account_id="wasps", actor="me")
    async with worker(gate.carry, pace=Pace(concurrent=8, concurrent_per_account=2)) as one:
        now = one.tasks.ledger.now()
        many = [new_row(hive, f"stay {n}", thread=f"cli:{n}", actor="me", now=now) for n in range(300)]
        async with database.write() as connection:
            await connection.execute(insert(rows), many)
        one.wake()
        await until(lambda: len(gate.begun) == 2)
        lone = await one.tasks.submit(nest, "lone", actor="me")
        assert (await ended(one.tasks, lone)).status == "succeeded"
        assert len(gate.begun) == 3, "a tenant has no more at once than its share"


async def test_no_more_tasks_of_a_tenant_begin_in_a_minute_than_are_allowed(
    worker: Open, hive: Hive, hives: Hives, gate: Gate, database: Database
) -> None:
    await Accounts(database).create("wasps")
    nest = await hives.create("nest", account_id="wasps", actor="me")
    async with worker(gate.carry, pace=Pace(starts_per_minute=2)) as one:
        three = [await one.tasks.submit(hive, f"{n}", thread=f"cli:{n}", actor="me") for n in range(3)]
        await until(lambda: len(gate.begun) == 2)
        lone = await one.tasks.submit(nest, "lone", actor="me")
        assert (await ended(one.tasks, lone)).status == "succeeded"
        assert sorted([await status(one.tasks, task) for task in three]) == ["queued", "succeeded", "succeeded"]
    assert len(gate.begun) == 3, "a tenant that has begun enough waits, another does not"


async def test_a_key_makes_one_task_however_often_it_is_sent(hive: Hive, database: Database, log: EventLog) -> None:
    tasks = Tasks(database, log)
    sent = [tasks.submit(hive, "once", thread=f"cli:{n}", actor="me", key="order-7") for n in range(5)]
    made = await asyncio.gather(*sent)
    assert len({task.id for task in made}) == 1
    assert len(await tasks.list(account_id="bees")) == 1


async def test_an_account_that_has_spent_its_day_waits_for_the_next(
    hive: Hive, hives: Hives, database: Database, log: EventLog
) -> None:
    await Accounts(database).create("wasps")
    nest = await hives.create("nest", account_id="wasps", actor="me")
    tasks, now = Tasks(database, log, usd_per_day=1.0), datetime(2026, 3, 2, 0, 30, tzinfo=UTC)
    tasks.ledger.now = lambda: now
    spent = [
        new_row(hive, "dear", thread="cli:a", actor="me", now=now - timedelta(hours=1), usd=5.0, status="succeeded"),
        new_row(hive, "cheap", thread="cli:b", actor="me", now=now, usd=0.9, status="succeeded"),
    ]
    async with database.write() as connection:
        for row in spent:
            await connection.execute(insert(rows).values(**row))
    ended = await tasks.submit(hive, "one more", actor="me")
    async with database.write() as connection:
        await connection.execute(update(rows).where(rows.c.id == ended.id).values(usd=0.2, status="succeeded"))
    with pytest.raises(LimitReached, match=r"spent \$1\.10 today"):
        await tasks.submit(hive, "too much", actor="me")
    with pytest.raises(LimitReached):
        await tasks.retry(ended.id, account_id="bees", actor="me")
    await tasks.submit(nest, "another account", actor="me")


@pytest.mark.parametrize("prompt", ["", " \n", "a\0b", "\x1b[2J", "x" * 300_000, "\ud800"])
async def test_a_prompt_that_is_no_text_is_refused_and_leaves_nothing(
    hive: Hive, database: Database, log: EventLog, prompt: str
) -> None:
    tasks = Tasks(database, log)
    with pytest.raises(InvalidRequest):
        await tasks.submit(hive, prompt, actor="me")
    assert await tasks.list(account_id="bees") == ()


async def test_a_task_of_another_account_is_not_there(hive: Hive, database: Database, log: EventLog) -> None:
    tasks = Tasks(database, log)
    task = await tasks.submit(hive, "mine", actor="me")
    for act in (tasks.show, tasks.steps):
        with pytest.raises(NotFound) as theirs:
            await act(task.id, account_id="wasps")
        with pytest.raises(NotFound) as nobodys:
            await act("tsk_" + "a" * 26, account_id="wasps")
        assert str(theirs.value).replace(task.id, "") == str(nobodys.value).replace("tsk_" + "a" * 26, "")


async def test_a_task_that_has_not_begun_is_cancelled_at_once(hive: Hive, database: Database, log: EventLog) -> None:
    tasks = Tasks(database, log)
    task = await tasks.submit(hive, "never", actor="me")
    task = await tasks.cancel(task.id, account_id="bees", actor="me", why="no need")
    assert (task.status, task.starts, task.error) == ("cancelled", 0, "no need")
    assert await tasks.cancel(task.id, account_id="bees", actor="me") == task


async def test_what_follows_a_task_is_done_for_one_that_never_began(
    worker: Open, hive: Hive, gate: Gate, database: Database, log: EventLog
) -> None:
    followed: list[str] = []

    async def job(task: Task, _: Hive) -> None:
        followed.append(f"{task.prompt} {task.status}")

    tasks = Tasks(database, log)
    never = await tasks.submit(hive, "never", actor="me")
    await tasks.cancel(never.id, account_id="bees", actor="me")
    async with worker(gate.carry, jobs={"job": job}) as one:
        await until(lambda: followed == ["never cancelled"])
        await ended(one.tasks, await one.tasks.submit(hive, "second", actor="me"))
        await until(lambda: len(followed) > 1)
    assert followed == ["never cancelled", "second succeeded"]
    assert gate.begun == ["second"]


async def test_tasks_go_on_when_the_engine_has_lost_its_tables(
    worker: Open, hive: Hive, gate: Gate, database: Database
) -> None:
    async with worker(gate.carry) as one:
        task = await one.tasks.submit(hive, "stay", actor="me")
        await until(lambda: gate.begun == ["stay"])
    assert database.location.path is not None
    for file in database.location.path.parent.glob("dbos.db*"):
        file.unlink()
    gate.open.set()
    async with worker(gate.carry) as one:
        assert (await ended(one.tasks, task)).status == "succeeded"
