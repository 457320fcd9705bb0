"""Bring tasks that are on record to the engine: in order in each thread, and no tenant before another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Select, and_, func, or_, select, update

from skep.errors import NotFound
from skep.state.record import write_time
from skep.state.schema import tasks
from skep.tasks.ledger import Ledger
from skep.tasks.task import ENDED, OPEN, Task
from skep.tasks.tasks import cancel

#: Tasks of one account that the engine has at once: enough never to wait for more, and few enough for its tables.
WINDOW = 64

Enqueue = Callable[[Task], Awaitable[None]]


class Dispatcher:
    """Tells an engine of the tasks that may run. Several may do so at once: telling twice is harmless."""

    def __init__(self, ledger: Ledger, enqueue: Enqueue, see_off: Enqueue) -> None:
        self._ledger = ledger
        self._enqueue = enqueue
        self._see_off = see_off

    async def sweep(self) -> int:
        """Bring on whatever can be brought on; return how many tasks the engine was told of."""
        due = await self._due()
        told = await self._bring() if "queued" in due else 0
        if "waiting" in due:
            await self._displace()
            await self._end_hopeless()
            if await self._promote():
                told += await self._bring()
        if not due.isdisjoint(ENDED):
            await self._follow_up()
        return told

    async def _due(self) -> set[str]:
        """Return which tasks there is something to do for, by their status: mostly none."""
        async with self._ledger.database.read() as connection:
            return set((await connection.execute(_statuses_due())).scalars())

    async def _bring(self) -> int:
        ready = await self._ledger.select(_ready())
        for task in ready:
            try:
                await self._enqueue(task)
            except NotFound as error:  # of a fork: what it was to begin from
                await self._ledger.end(task, "failed", why=error.message, actor="queen", error=error.message)
        if ready:
            await self._mark([task.id for task in ready])
        return len(ready)

    async def _follow_up(self) -> None:
        """Have done what follows tasks that ended before the engine knew of them: no worker saw their end."""
        if ended := await self._ledger.select(_unseen()):
            for task in ended:
                await self._see_off(task)
            await self._mark([task.id for task in ended])

    async def _displace(self) -> None:
        """End the tasks that stand before one that does not wait."""
        pushing = (tasks.c.same_thread.in_(("interrupt", "rollback")), tasks.c.parent.is_(None))
        for task in await self._ledger.select(_waiting().where(*pushing)):
            for earlier in await self._ledger.select(before(task)):
                await cancel(self._ledger, earlier, actor="queen", why=f"the prompt {task.id} took its place")

    async def _end_hopeless(self) -> None:
        """End the tasks that were to follow one that did not succeed."""
        for task in await self._ledger.select(_waiting().where(tasks.c.parent.is_not(None))):
            lost = (tasks.c.id.in_(task.after), tasks.c.status.in_(("failed", "cancelled")))
            for other in await self._ledger.select(select(tasks).where(*lost).limit(1)):
                why = f"{other.title or other.id}, which comes before it, did not succeed"
                await self._ledger.end(task, "cancelled", why=why, actor="queen", error=why)

    async def _promote(self) -> bool:
        """Let those run whose thread is free, or whose forerunners are done; say whether there are any."""
        free = [task.id for task in await self._ledger.select(_first_in_threads())]
        for task in await self._ledger.select(_waiting().where(tasks.c.parent.is_not(None))):
            if not await self._ledger.select(before(task).limit(1)):
                free.append(task.id)
        if free:
            statement = update(tasks).where(tasks.c.id.in_(free), tasks.c.status == "waiting").values(status="queued")
            async with self._ledger.database.write() as connection:
                await connection.execute(statement)
        return bool(free)

    async def _mark(self, ids: Sequence[str]) -> None:
        async with self._ledger.database.write() as connection:
            await connection.execute(update(tasks).where(tasks.c.id.in_(ids)).values(enqueued=True))


@cache
def _ready() -> Select[Any]:
    """Find the tasks to enqueue: of every account as many as there is room for, oldest first."""
    line = (tasks.c.enqueued.desc(), tasks.c.created_at, tasks.c.id)
    place = func.row_number().over(partition_by=tasks.c.account_id, order_by=line)
    known = and_(tasks.c.enqueued.is_(True), tasks.c.status.in_(OPEN))
    new = and_(tasks.c.enqueued.is_(False), tasks.c.status == "queued")
    inner = select(tasks, place.label("n")).where(or_(known, new)).subquery()
    fit = (inner.c.n <= WINDOW, inner.c.enqueued.is_(False))
    return select(inner).where(*fit).order_by(inner.c.n)


@cache
def _unseen() -> Select[Any]:
    return select(tasks).where(tasks.c.enqueued.is_(False), tasks.c.status.in_(ENDED)).limit(WINDOW)


@cache
def _statuses_due() -> Select[str]:
    new = and_(tasks.c.enqueued.is_(False), tasks.c.status.in_(("queued", *ENDED)))
    return select(tasks.c.status).where(or_(new, tasks.c.status == "waiting")).distinct()


def _waiting() -> Select[Any]:
    return select(tasks).where(tasks.c.status == "waiting").order_by(tasks.c.created_at, tasks.c.id)


def _first_in_threads() -> Select[Any]:
    """Find the tasks that wait though no other of their thread is before them."""
    thread = (tasks.c.hive_id, tasks.c.thread)
    in_line = func.row_number().over(partition_by=thread, order_by=(tasks.c.created_at, tasks.c.id))
    inner = select(tasks, in_line.label("n")).where(tasks.c.status.in_(OPEN), tasks.c.parent.is_(None)).subquery()
    return select(inner).where(inner.c.n == 1, inner.c.status == "waiting")


def before(task: Task) -> Select[Any]:
    """Find the tasks that have to end before this one may begin."""
    if task.parent is not None:
        return select(tasks).where(tasks.c.id.in_(task.after), tasks.c.status.in_(OPEN))
    at = write_time(task.created_at)
    earlier = or_(tasks.c.created_at < at, and_(tasks.c.created_at == at, tasks.c.id < task.id))
    same = (tasks.c.hive_id == task.hive_id, tasks.c.thread == task.thread, tasks.c.parent.is_(None))
    return select(tasks).where(*same, tasks.c.status.in_(OPEN), earlier)
