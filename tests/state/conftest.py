"""Fixtures for the tests of state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import text

from skep.state.database import Database

DEADLINE_S = 30
WAITING = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")

UntilWaiting = Callable[[asyncio.Task[Any]], Awaitable[None]]


@pytest.fixture
def until_waiting(database: Database) -> UntilWaiting:
    """Give a wait until a task waits for the lock of another transaction, which is open all the while.

    PostgreSQL tells. On SQLite a write cannot do anything but wait, so it is enough that the task has run.
    """

    async def wait(task: asyncio.Task[Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not await _waits(database):
            assert not task.done() and time.monotonic() < deadline
            await asyncio.sleep(0.01)

    return wait


async def _waits(database: Database) -> bool:
    await asyncio.sleep(0.01)
    if database.dialect == "sqlite":
        return True
    async with database.read() as connection:
        return bool((await connection.execute(WAITING)).scalar_one())
