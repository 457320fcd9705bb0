"""The tasks of a database: asked for, looked at, followed, ended and tried again."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing, suppress
from datetime import UTC
from functools import partial
from typing import Any

from sqlalchemy import func, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import Conflict, InvalidRequest, LeaseLost, LimitReached
from skep.sessions.key import check_key as check_thread
from skep.state.database import Database
from skep.state.events import (
    Answered,
    Asked,
    CancelAsked,
    Event,
    Observed,
    Planned,
    Prompted,
    Recorded,
    TaskEnded,
    TaskForked,
)
from skep.state.hives import Hive, Hives
from skep.state.log import EventLog
from skep.state.names import shown
from skep.state.record import write_time
from skep.state.schema import events, steps, tasks
from skep.tasks import outline
from skep.tasks.ledger import Ledger, change
from skep.tasks.submission import check_key, check_prompt, enter, new_row, new_task
from skep.tasks.task import ENDED, STATUSES, Step, Task

MOST_LISTED = 1000
#: How often somebody who waits looks whether another process has brought a task to its end.
LOOK_S = 0.25


def _nobody() -> None:
    pass


class Tasks:
    """What a person, or a program for one, does with tasks. It works on the record alone: workers follow it.

    `wake` is called when there is something for a worker of this process to do at once; others look twice a second.
    An account whose tasks of today have cost `usd_per_day` has to wait for tomorrow.
    """

    def __init__(
        self,
        database: Database,
        log: EventLog,
        *,
        wake: Callable[[], None] = _nobody,
        usd_per_day: float | None = None,
    ) -> None:
        self.ledger = Ledger(database, log)
        self._usd_per_day = usd_per_day
        self.wake = wake
        self._hives = Hives(database, log)
        #: Of tasks that somebody waits for here.
        self._over: weakref.WeakValueDictionary[str, asyncio.Event] = weakref.WeakValueDictionary()

    async def submit(
        self, hive: Hive, prompt: str, *, thread: str = "cli:default", actor: str, key: str | None = None
    ) -> Task:
        """Take a prompt; it is on record, and will be worked on, when this returns.

        The same `key` again, of the same account, returns the task that it made first. A thread that is busy does what
        the hive's `same_thread` says: the prompt waits, raises ThreadBusy, or ends the task before it.
        """
        check_prompt(prompt)
        check_thread(thread)
        check_key(key)
        now = self.ledger.now()
        row = new_row(hive, prompt, thread=thread, actor=actor, now=now, idempotency_key=key)
        if key is not None and (known := await self._of_key(hive.account_id, key)) is not None:
            return known
        try:
            return await self._enter(row, [Prompted(text=prompt, thread=thread)])
        except IntegrityError:
            if key is None or (known := await self._of_key(hive.account_id, key)) is None:
                raise
            return known

    async def _enter(self, row: dict[str, Any], happened: list[Event]) -> Task:
        await self._require_budget(row["account_id"])
        filed = {"hive_id": row["hive_id"], "account_id": row["account_id"], "actor": row["actor"]}
        await self.ledger.log.append_all(happened, task_id=row["id"], alongside=partial(_enter, row), **filed)
        self.wake()
        return new_task(row)

    async def _require_budget(self, account_id: str) -> None:
        if self._usd_per_day is None:
            return
        today = self.ledger.now().astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        mine = (tasks.c.account_id == account_id, tasks.c.created_at >= write_time(today), tasks.c.parent.is_(None))
        async with self.ledger.database.read() as connection:
            spent = (await connection.execute(select(func.sum(tasks.c.usd)).where(*mine))).scalar_one() or 0.0
        if 0 < spent >= self._usd_per_day:
            raise LimitReached(
                f"the account {account_id} has spent ${spent:.2f} today, of ${self._usd_per_day:.2f}",
                hint="wait until tomorrow (UTC), or raise budgets.usd_per_day",
            )

    async def _of_key(self, account_id: str, key: str) -> Task | None:
        same = (tasks.c.account_id == account_id, tasks.c.idempotency_key == key)
        found = await self.ledger.select(select(tasks).where(*same))
        return found[0] if found else None

    async def show(self, task_id: str, *, account_id: str) -> Task:
        """Return a task of that account; NotFound for any other."""
        return await self.ledger.get(task_id, account_id=account_id)

    async def steps(self, task_id: str, *, account_id: str) -> tuple[Step, ...]:
        """Return the durable steps that a task took, for `fork`."""
        task = await self.show(task_id, account_id=account_id)
        return await outline.read_steps(self.ledger, task)

    async def list(
        self, *, account_id: str, hive_id: str | None = None, statuses: Collection[str] = (), limit: int = 50
    ) -> tuple[Task, ...]:
        """Return tasks of an account, the newest first."""
        if unknown := sorted(set(statuses) - set(STATUSES)):
            raise InvalidRequest(f"there is no status {shown(unknown[0])}", hint=f"use some of {', '.join(STATUSES)}")
        if not 1 <= limit <= MOST_LISTED:
            raise InvalidRequest(f"limit is {limit}", hint=f"use 1 to {MOST_LISTED}")
        statement = select(tasks).where(tasks.c.account_id == account_id)
        if hive_id is not None:
            statement = statement.where(tasks.c.hive_id == hive_id)
        if statuses:
            statement = statement.where(tasks.c.status.in_(statuses))
        return await self.ledger.select(statement.order_by(tasks.c.created_at.desc(), tasks.c.id).limit(limit))

    async def cancel(self, task_id: str, *, account_id: str, actor: str, why: str = "") -> Task:
        """Have a task and all that it has others do end at once; harmless if it has ended."""
        while True:
            task = await self.show(task_id, account_id=account_id)
            if task.ended or await cancel(self.ledger, task, actor=actor, why=why):
                break
        for child in await self.ledger.select(_open_children(task_id)):
            await self.cancel(child.id, account_id=account_id, actor=actor, why=f"{task_id} was cancelled")
        self.wake()
        self.ended(task_id)
        return await self.show(task_id, account_id=account_id)

    async def retry(self, task_id: str, *, account_id: str, actor: str) -> Task:
        """Make a new task of an ended one's prompt."""
        return await self._again(await self._ended(task_id, account_id), 0, actor)

    async def fork(self, task_id: str, step: int, *, account_id: str, actor: str) -> Task:
        """Make a new task that takes over the steps of an ended one up to and with `step`, and goes on from there.

        The files of the workspace are not part of a step: they stay as they are.
        """
        task = await self._ended(task_id, account_id)
        last = max((one.number for one in await outline.read_steps(self.ledger, task)), default=0)
        if not 0 <= step <= last:
            reach = f"it has the steps 1 to {last}" if last else "it has none"
            raise InvalidRequest(f"task {task_id} has no step {step}: {reach}", hint=f"see: skep task show {task_id}")
        return await self._again(task, step, actor)

    async def _ended(self, task_id: str, account_id: str) -> Task:
        task = await self.show(task_id, account_id=account_id)
        if not task.ended:
            raise Conflict(
                f"task {task_id} has not ended, it is {task.status}",
                hint=f"wait for it, or end it with: skep task cancel {task_id}",
            )
        return task

    async def _again(self, task: Task, step: int, actor: str) -> Task:
        hive = await self._hives.show(task.hive_id, account_id=task.account_id)
        kept = {"agreement": task.agreement} if step else {}
        row = new_row(
            hive, task.prompt, thread=task.thread, actor=actor, now=self.ledger.now(), origin=task.id, step=step, **kept
        )
        return await self._enter(
            row, [TaskForked(origin=task.id, step=step), Prompted(text=task.prompt, thread=task.thread)]
        )

    async def answer(self, task_id: str, answer: str, *, account_id: str, actor: str, call: str | None = None) -> Task:
        """Answer what a task asks, or the question that `call` names; Conflict if it asks nothing."""
        task = await self.show(task_id, account_id=account_id)
        asked = await self._question(task, call)
        if asked.choices and asked.kind == "approval" and answer not in asked.choices:
            raise InvalidRequest(f"{shown(answer)} is no answer", hint=f"say {' or '.join(asked.choices)}")
        keep = partial(_keep_answer, task, asked)
        try:
            await self.ledger.append(
                task, [Answered(call=asked.call, answer=check_prompt(answer, named="answer"))], actor, keep
            )
        except (IntegrityError, LeaseLost) as error:
            raise _nothing_asked(task) from error
        self.wake()
        return await self.show(task_id, account_id=account_id)

    async def _question(self, task: Task, call: str | None) -> Asked:
        """Return the last question of a task that has no answer yet."""
        known = await self.ledger.log.page(
            task.hive_id, task_id=task.id, types=("asked", "answered", "observed"), limit=10_000
        )
        closed = {one.event.call for one in known if isinstance(one.event, Answered | Observed)}
        for one in reversed(known):
            if isinstance(one.event, Asked) and one.event.call not in closed and call in (None, one.event.call):
                return one.event
        raise _nothing_asked(task)

    async def follow(self, task: Task, *, after: int = 0) -> AsyncGenerator[Recorded]:
        """Yield the events of a task and of its children after that sequence number; end behind its TaskEnded."""
        family, start = await self._family(task)
        if after and (ended := await self._end_of(task)) is not None and ended <= after:
            return
        async with aclosing(self.ledger.log.follow(task.hive_id, after=max(after, start - 1))) as stream:
            async for recorded in stream:
                if recorded.task_id not in family:
                    continue
                if isinstance(recorded.event, Planned):
                    family |= {str(one["id"]) for one in recorded.event.tasks}
                yield recorded
                if recorded.task_id == task.id and isinstance(recorded.event, TaskEnded):
                    return

    async def _family(self, task: Task) -> tuple[set[str], int]:
        """Return the ids of a task and all below it, and the number of its first event."""
        same_root = select(tasks.c.id, tasks.c.parent).where(tasks.c.root == task.root).order_by(tasks.c.created_at)
        first = select(events.c.seq).where(events.c.hive_id == task.hive_id, events.c.task_id == task.id)
        async with self.ledger.database.read() as connection:
            rows = (await connection.execute(same_root)).all()
            start = (await connection.execute(first.order_by(events.c.seq).limit(1))).scalar_one_or_none()
        family = {task.id}
        for row in rows:
            if row.parent in family:
                family.add(row.id)
        return family, start or 1

    async def _end_of(self, task: Task) -> int | None:
        page = await self.ledger.log.page(task.hive_id, task_id=task.id, types=("task_ended",), limit=1)
        return page[0].seq if page else None

    async def wait(self, task_id: str, *, account_id: str, timeout_s: float | None) -> Task:
        """Return the task when it has ended, or as it is when the time is up."""
        over = self._over.setdefault(task_id, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (task := await self.show(task_id, account_id=account_id)).ended:
                    await _first_of(over.wait(), LOOK_S)
                    over.clear()
                return task
        return await self.show(task_id, account_id=account_id)

    def ended(self, task_id: str) -> None:
        """Tell those who wait here that a task may have ended; it is on record, so that others find out by looking."""
        if (over := self._over.get(task_id)) is not None:
            over.set()


async def _first_of(event: Awaitable[object], seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event


async def cancel(ledger: Ledger, task: Task, *, actor: str, why: str) -> bool:
    """Have one task end; False if it has changed since it was read."""
    asked, reason = CancelAsked(why=why), why or "somebody cancelled it"
    if task.status == "cancelling":
        return True
    if task.starts == 0:
        return await ledger.end(task, "cancelled", why=reason, actor=actor, before=[asked], error=reason)

    async def mark(connection: AsyncConnection) -> None:
        same = (tasks.c.starts == task.starts, tasks.c.status == task.status)
        await change(connection, task, {"status": "cancelling", "error": reason}, *same)

    try:
        await ledger.append(task, [asked], actor, mark)
    except LeaseLost:
        return False
    return True


async def _enter(row: dict[str, Any], connection: AsyncConnection) -> None:
    await enter(connection, row)


async def _keep_answer(task: Task, asked: Asked, connection: AsyncConnection) -> None:
    # The number is not that of the event: nobody reads an answer by its key, which only keeps a second one out.
    key = f"answered {asked.call} {asked.until}"
    await connection.execute(insert(steps).values(task_id=task.id, key=key, seq=0))
    await change(connection, task, {"status": "running"}, tasks.c.status == "asking")


def _open_children(task_id: str) -> Any:
    return select(tasks).where(tasks.c.parent == task_id, tasks.c.status.not_in(ENDED))


def _nothing_asked(task: Task) -> Conflict:
    return Conflict(f"task {task.id} waits for no answer", hint=f"see: skep task show {task.id}")
