"""What a prompt has to undo that took the place of others, by what is on record of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sqlalchemy import insert

from skep.state.database import Database
from skep.state.hives import Hive
from skep.state.log import EventLog
from skep.state.record import write_time
from skep.state.schema import tasks
from skep.tasks.ledger import Ledger
from skep.tasks.rewind import Undo, find_undo
from skep.tasks.submission import new_row, new_task
from skep.tasks.task import Task

BEGAN = datetime(2026, 3, 1, tzinfo=UTC)


class Line:
    """Puts tasks on record as they would be, second by second."""

    def __init__(self, database: Database, log: EventLog, hive: Hive) -> None:
        self.ledger = Ledger(database, log)
        self._hive = hive

    async def add(
        self, at: int, status: str, *, ended: int | None = None, before: str | None = None, thread: str = "cli:one"
    ) -> Task:
        row = new_row(self._hive, "dig", thread=thread, actor="me", now=_time(at), status=status)
        row |= {"checkpoint": before, "started_at": _text(at if before else None), "ended_at": _text(ended)}
        async with self.ledger.database.write() as connection:
            await connection.execute(insert(tasks).values(**row))
        return new_task(row)


def _time(at: int) -> datetime:
    return BEGAN + timedelta(seconds=at)


def _text(at: int | None) -> str | None:
    return None if at is None else write_time(_time(at))


async def test_what_displaced_tasks_did_is_undone_even_if_one_of_them_never_began(
    database: Database, log: EventLog, hive: Hive
) -> None:
    line = Line(database, log, hive)
    await line.add(0, "cancelled", ended=5, before="old")
    await line.add(10, "succeeded", ended=12, before="good")
    await line.add(20, "cancelled", ended=31, before="first")
    await line.add(30, "cancelled", ended=41)
    newest = await line.add(40, "queued")
    assert await find_undo(line.ledger, newest, hive) == Undo("first")


async def test_what_ended_before_the_next_prompt_came_is_not_undone(
    database: Database, log: EventLog, hive: Hive
) -> None:
    line = Line(database, log, hive)
    await line.add(0, "cancelled", ended=5, before="old")
    assert await find_undo(line.ledger, await line.add(10, "queued"), hive) == Undo(None)


async def test_the_work_of_other_threads_in_a_shared_workspace_is_not_undone(
    database: Database, log: EventLog, hive: Hive
) -> None:
    line = Line(database, log, hive)
    await line.add(0, "succeeded", ended=10, before="x", thread="cli:two")
    await line.add(20, "cancelled", ended=31, before="first")
    newest = await line.add(30, "queued")
    assert await find_undo(line.ledger, newest, hive) == Undo("first")
    await line.add(21, "succeeded", ended=25, before="y", thread="cli:two")
    assert await find_undo(line.ledger, newest, hive) == Undo(None, shared=True)
    apart = replace(hive, upkeep=hive.upkeep.changed({"threads": "thread"}))
    assert await find_undo(line.ledger, newest, apart) == Undo("first")
