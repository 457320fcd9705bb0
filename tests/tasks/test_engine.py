"""The engine beneath tasks, as a process opens it."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select

from skep.state.database import Database
from skep.state.schema import hives
from skep.tasks.engine import Engine, Pace


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
