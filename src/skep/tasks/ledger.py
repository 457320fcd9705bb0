"""The record of tasks. Every change that somebody should know of is an event, written with the row or not at all.

Whoever changes a task does so in the transaction of an event of its hive, and so under the lock on the end of the
hive's log: changes of one hive's tasks happen one after the other, on either database and from any process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import LeaseLost
from skep.state.accounts import utc_now
from skep.state.database import Database
from skep.state.events import Event, Recorded, TaskEnded, TaskStarted
from skep.state.log import EventLog
from skep.state.record import read_time, write_time
from skep.state.schema import steps, tasks
from skep.state.writer import Alongside
from skep.tasks.task import ENDED, End, Status, Task, is_task_id, missing

_TIMES = ("created_at", "started_at", "ended_at")
_FIELDS = tuple(name for name in Task.__dataclass_fields__)
_FIND = select(tasks).where(tasks.c.id == bindparam("task"))


class Ledger:
    """The tasks of a database."""

    def __init__(self, database: Database, log: EventLog, *, now: Callable[[], datetime] = utc_now) -> None:
        self.database = database
        self.log = log
        self.now = now

    async def find(self, task_id: str) -> Task | None:
        found = await self.select(_FIND, task=task_id)
        return found[0] if found else None

    async def get(self, task_id: str, *, account_id: str) -> Task:
        """Return a task of that account; whether another account has one by that name is not told."""
        found = await self.find(task_id) if is_task_id(task_id) else None
        if found is None or found.account_id != account_id:
            raise missing(task_id)
        return found

    async def select(self, statement: Select[Any], **parameters: Any) -> tuple[Task, ...]:
        async with self.database.read() as connection:
            return tuple(read_task(row) for row in (await connection.execute(statement, parameters)).mappings())

    async def append(
        self, task: Task, events: Sequence[Event], actor: str, alongside: Alongside | None
    ) -> Sequence[Recorded]:
        """Record events of a task, and do the rest in the same transaction."""
        return await self.log.append_all(
            events,
            hive_id=task.hive_id,
            account_id=task.account_id,
            actor=actor,
            task_id=task.id,
            alongside=alongside,
        )

    async def start(self, task_id: str, *, worker: str) -> Task | None:
        """Begin a task, or take it over from whoever had it; None if it has ended.

        From then on nothing is written by whoever had it before.
        """
        while (task := await self.find(task_id)) is not None and not task.ended:
            begun = replace(
                task,
                worker=worker,
                starts=task.starts + 1,
                status="cancelling" if task.status == "cancelling" else "running",
                started_at=task.started_at or self.now(),
                attempt=max(task.attempt, 1),
            )
            try:
                await self._start(task, begun)
            except LeaseLost:
                continue  # somebody changed it meanwhile
            return begun
        return None

    async def _start(self, task: Task, begun: Task) -> None:
        values = {name: getattr(begun, name) for name in ("worker", "starts", "status", "attempt")}
        values["started_at"] = write_time(begun.started_at or self.now())

        async def take(connection: AsyncConnection) -> None:
            same = (tasks.c.starts == task.starts, tasks.c.status == task.status)
            await change(connection, task, values, *same)

        await self.append(task, [TaskStarted(worker=begun.worker or "", start=begun.starts)], "worker", take)

    async def end(
        self, task: Task, status: End, *, why: str, actor: str, before: Sequence[Event] = (), **changes: Any
    ) -> bool:
        """Bring a task to its end, after the events `before`; False if it has come to one already."""
        ended = {**changes, "status": status, "ended_at": write_time(self.now()), "error": changes.get("error")}

        async def close(connection: AsyncConnection) -> None:
            await change(connection, task, ended, tasks.c.status == task.status, tasks.c.starts == task.starts)

        last = TaskEnded(status=status, why=why)
        try:
            await self.append(task, [*before, last], actor, close)
        except LeaseLost:
            return False
        return True


async def change(
    connection: AsyncConnection, task: Task, values: Mapping[str, Any], *conditions: ColumnElement[bool]
) -> None:
    """Change a row that has not ended, or raise LeaseLost if it is not as the caller believes."""
    statement = update(tasks).where(tasks.c.id == task.id, tasks.c.status.not_in(ENDED), *conditions)
    if not (await connection.execute(statement.values(**_storable(values)))).rowcount:
        raise LeaseLost(f"task {task.id} was changed by another", hint="read it again")


async def insert_task(connection: AsyncConnection, row: Mapping[str, Any]) -> None:
    await connection.execute(insert(tasks).values(**_storable(row)))


def _storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Put another character in the place of NUL, which models can write and PostgreSQL cannot keep."""
    return {name: one.replace("\0", "\ufffd") if isinstance(one, str) else one for name, one in values.items()}


def held_by(worker: str, status: Status) -> Select[Any]:
    return select(tasks).where(tasks.c.status == status, tasks.c.worker == worker)


def keys_of(task_id: str) -> Select[Any]:
    return select(steps.c.key, steps.c.seq).where(steps.c.task_id == task_id)


def read_task(row: Mapping[str, Any]) -> Task:
    values = {name: row[name] for name in _FIELDS}
    for name in _TIMES:
        values[name] = None if values[name] is None else read_time(values[name])
    return Task(**{**values, "after": tuple(json.loads(values["after"]))})
