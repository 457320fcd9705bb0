"""The engine beneath tasks, as a process opens it."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select

from skep.state.accounts import Accounts
from skep.state.database import Database
from skep.state.hives import Hives
from skep.state.leases import Leases
from skep.state.log import EventLog
from skep.state.schema import hives
from skep.tasks.engine import Engine, Pace
from skep.tasks.run import Outcome, Run
from skep.tasks.worker import run_worker


async def nothing(_: str) -> None:
    """Carry no task: there is none."""


@pytest.mark.service
@pytest.mark.timeout(30)
async def test_the_first_start_waits_for_those_who_read_and_does_not_hold_them_up(postgres_url: str) -> None:
    database, reading = await Database.open(postgres_url), asyncio.Event()

    async def read() -> None:
        async with database.read() as connection:
            await connection.execute(select(hives.c.id))
            reading.set()
            await asyncio.sleep(0.5)  # as one does who has more to read

    reader = asyncio.create_task(read())
    await reading.wait()
    engine = await Engine.start(database.location, "worker", carry=nothing, follow_up=nothing, pace=Pace())
    await reader
    await engine.close()
    await database.close()


async def with_nul(run: Run) -> Outcome:
    """Reply with what a model can write, and PostgreSQL cannot keep."""
    return Outcome("succeeded", "done", reply="a\0b")


@pytest.mark.service
async def test_a_reply_that_the_database_cannot_keep_as_it_is_ends_its_task(postgres_url: str) -> None:
    database = await Database.open(postgres_url)
    log = EventLog(database)
    await Accounts(database).create("bees")
    hive = await Hives(database, log).create("garden", account_id="bees", actor="me")
    async with run_worker(database, log, Leases(database), host="here", carry=with_nul) as worker:
        task = await worker.tasks.submit(hive, "hello", actor="me")
        task = await worker.tasks.wait(task.id, account_id="bees", timeout_s=20)
    await log.close()
    await database.close()
    assert (task.status, task.reply) == ("succeeded", "a\ufffdb")
