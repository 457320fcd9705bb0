"""What one worker puts on record of one task: each thing once, however often its step is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import Text, bindparam, insert, literal, select, true, union_all
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.dml import ReturningInsert

from skep.errors import Defect, LeaseLost, Unavailable
from skep.state.events import Event, Recorded
from skep.state.schema import event_heads, steps, tasks
from skep.state.writer import Alongside
from skep.tasks.ledger import Ledger, change, keys_of
from skep.tasks.task import ENDED, Task

#: How long a database that is away is waited for, and how long between two tries.
PATIENCE_S = 60.0
_PAUSE_S = 0.25
#: How long something that is due waits for what will be recorded next, to share its transaction.
SOON_S = 0.02

Entry = tuple[str, Event]
E = TypeVar("E", bound=Event)


class Journal:
    """The record of a task for the worker that has it.

    An event is kept under a key; one that is there already is not written again. Whoever lost the task to another
    worker gets LeaseLost and writes nothing.

    `life` tells what is recorded under a key from what was, if steps that are on record here were lost by the engine:
    they were taken anew, and may have come to something else.
    """

    def __init__(self, ledger: Ledger, task: Task, keys: Mapping[str, int], *, actor: str = "worker") -> None:
        self._ledger = ledger
        self._task = task
        self._keys = dict(keys)
        self._found = frozenset(keys)
        self._actor = actor
        self.life = 0
        self._due: list[Entry] = []
        self._kept: dict[str, Any] = {}
        self._turn = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._behind: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, ledger: Ledger, task: Task, *, actor: str = "worker") -> Journal:
        # Whoever is the first to begin a task finds nothing.
        keys = {} if task.starts == 1 else await read_keys(ledger, task.id)
        return cls(ledger, task, keys, actor=actor)

    def _named(self, key: str) -> str:
        return f"{self.life}/{key}" if self.life else key

    def __contains__(self, key: str) -> bool:
        return self._named(key) in self._keys

    def found(self, key: str) -> bool:
        """Say whether a worker before this one had recorded something under a key."""
        return self._named(key) in self._found

    async def read(self, key: str) -> Recorded:
        """Return what was recorded under a key, by whichever worker."""
        await self.flush()
        seq = self._keys[self._named(key)]
        page = await self._ledger.log.page(self._task.hive_id, after=seq - 1, limit=1)
        if not page or page[0].seq != seq:
            raise Defect(f"event {seq} of {self._task.hive_id} is not where task {self._task.id} has it")
        return page[0]

    def note(self, key: str, event: Event) -> None:
        """Record an event with the next that is recorded, or soon if there is none for a while."""
        named = self._named(key)
        if named not in self._keys and all(named != due for due, _ in self._due):
            self._due.append((named, event))

    def keep(self, **changes: Any) -> None:
        """Change the task's row with whatever is recorded next."""
        self._kept |= changes

    def write_soon(self) -> None:
        """Write what is due in a moment: something that may take long follows. `record` or `flush` say if it failed."""
        if self._behind is not None and self._behind.done():
            self._behind.result()
            self._behind = None
        if self._due and self._behind is None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SOON_S, self._write_behind)

    def write_now(self) -> None:
        """Begin to write what is due, without waiting for it."""
        if self._behind is not None and self._behind.done():
            self._behind.result()
            self._behind = None
        self._write_behind()

    def _write_behind(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._due and self._behind is None:
            self._behind = asyncio.create_task(self._write_due(), name=f"skep journal {self._task.id}")

    async def record(self, *entries: Entry, also: Alongside | None = None, **changes: Any) -> None:
        """Record events now, behind those that are due.

        With `changes` of the task's row, and whatever `also` does, in the same transaction.
        """
        for key, event in entries:
            self.note(key, event)
        await self._drain(changes, also)
        await self.flush()

    async def flush(self, **changes: Any) -> None:
        """Wait until everything is on record."""
        await self._drain(changes)
        if self._behind is not None and self._behind.done():
            self._behind.result()

    async def close(self) -> None:
        """Write what is due, and leave nothing running."""
        try:
            await self.flush()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._behind is not None:
                await asyncio.wait([self._behind])

    async def _write_due(self) -> None:
        await self._drain({})

    async def _drain(self, changes: Mapping[str, Any], also: Alongside | None = None) -> None:
        async with self._turn:
            entries, self._due = self._due, []
            changes, self._kept = {**self._kept, **changes}, {}
            if entries or changes:
                await self._write(entries, changes, also)

    async def _write(self, entries: Sequence[Entry], changes: Mapping[str, Any], also: Alongside | None) -> None:
        """Write, and wait for a database that is away for a while."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                return await self._append(entries, changes, also)
            except LeaseLost:
                raise
            except Unavailable:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_PAUSE_S)
            except IntegrityError:
                # The try before did commit, though its answer was lost.
                self._keys = await read_keys(self._ledger, self._task.id)
                if not all(key in self._keys for key, _ in entries):
                    raise
                return None

    async def _append(self, entries: Sequence[Entry], changes: Mapping[str, Any], also: Alongside | None) -> None:
        if not entries:
            async with self._ledger.database.write() as connection:
                await change(connection, self._task, changes, tasks.c.starts == self._task.starts)
            return
        keep = _keep(len(entries))
        kept: dict[str, Any] = {f"key_{n}": key for n, (key, _) in enumerate(entries, start=1)}
        kept |= {"task": self._task.id, "held": self._task.starts}

        async def alongside(connection: AsyncConnection) -> None:
            if len((await connection.execute(keep, kept)).all()) != len(entries):
                raise LeaseLost(f"task {self._task.id} has ended, or another worker has it", hint="stop working on it")
            if changes:
                await change(connection, self._task, changes)
            if also is not None:
                await also(connection)

        recorded = await self._ledger.append(self._task, [event for _, event in entries], self._actor, alongside)
        self._keys.update({key: one.seq for (key, _), one in zip(entries, recorded, strict=True)})


def event_of(recorded: Recorded, kind: type[E]) -> E:
    """Return the event of a record that was made as one of this kind."""
    if not isinstance(recorded.event, kind):
        raise Defect(f"event {recorded.seq} of {recorded.hive_id} is no {kind.__name__}")
    return recorded.event


@cache
def _keep(count: int) -> ReturningInsert[tuple[int]]:
    """Put down keys with the numbers that their events are going to have, if the worker still has the task."""
    named = (bindparam(f"key_{n}", type_=Text).label("key") for n in range(1, count + 1))
    new = union_all(*(select(key, literal(n).label("n")) for n, key in enumerate(named, start=1))).subquery()
    mine = (tasks.c.id == bindparam("task"), tasks.c.starts == bindparam("held"), tasks.c.status.not_in(ENDED))
    joined = tasks.join(event_heads, event_heads.c.hive_id == tasks.c.hive_id).join(new, true())
    rows = select(tasks.c.id, new.c.key, event_heads.c.seq + new.c.n).select_from(joined).where(*mine)
    return insert(steps).from_select(["task_id", "key", "seq"], rows).returning(steps.c.seq)


async def read_keys(ledger: Ledger, task_id: str) -> dict[str, int]:
    async with ledger.database.read() as connection:
        return {row.key: row.seq for row in (await connection.execute(keys_of(task_id))).all()}
