"""Fixtures for the tests of tasks: a hive on record, and workers that carry its tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from skep.state.accounts import Accounts
from skep.state.database import Database
from skep.state.hives import Hive, Hives
from skep.state.leases import Leases
from skep.state.log import EventLog
from skep.tasks.worker import Carry, Worker, run_worker

DEADLINE_S = 30.0

Open = Callable[..., AbstractAsyncContextManager[Worker]]


async def until(holds: Callable[[], Awaitable[bool]] | Callable[[], bool]) -> None:
    """Wait for something to come true."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = holds()
        if await found if isinstance(found, Awaitable) else found:
            return
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.01)


@pytest.fixture
def state_url(ready_sqlite_url: str) -> str:
    return ready_sqlite_url


@pytest.fixture
async def database(state_url: str) -> AsyncIterator[Database]:
    database = await Database.open(state_url)
    yield database
    await database.close()


@pytest.fixture
async def log(database: Database) -> AsyncIterator[EventLog]:
    log = EventLog(database)
    yield log
    await log.close()


@pytest.fixture
def hives(database: Database, log: EventLog) -> Hives:
    return Hives(database, log)


@pytest.fixture
async def hive(database: Database, hives: Hives) -> Hive:
    await Accounts(database).create("bees")
    return await hives.create("garden", account_id="bees", actor="me")


@pytest.fixture
def worker(database: Database, log: EventLog) -> Open:
    """Give a way to work on tasks in this process, with a function in the place of models and sandboxes."""

    def open_one(carry: Carry, **rest: object) -> AbstractAsyncContextManager[Worker]:
        return run_worker(database, log, Leases(database), host="here", carry=carry, **rest)  # type: ignore[arg-type]

    return open_one
