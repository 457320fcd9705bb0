"""Group commit: many appenders share one transaction, and so one wait for the disk."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import ChainBroken, Unavailable
from skep.state.database import Database
from skep.state.events import Recorded
from skep.state.notary import Notary
from skep.state.record import GENESIS, Draft, Head, Sealed, write_time
from skep.state.schema import event_heads, events

BATCH_EVENTS = 1000
BATCH_BYTES = 8 * 1024 * 1024

_LOCK = (
    select(event_heads)
    .where(event_heads.c.hive_id.in_(bindparam("hives", expanding=True)))
    .order_by(event_heads.c.hive_id)
    .with_for_update()
)
_INSERT = insert(events)
_ADVANCE = (
    update(event_heads)
    .where(event_heads.c.hive_id == bindparam("hive"))
    .values(seq=bindparam("to_seq"), hash=bindparam("to_hash"))
)


#: Work that is done in the transaction in which the events are recorded: both happen, or neither.
Alongside = Callable[[AsyncConnection], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one caller waits for: drafts that go into one transaction together, with other work or without."""

    drafts: Sequence[Draft]
    done: asyncio.Future[list[Recorded]]
    alongside: Alongside | None = None


class Writer:
    """Takes everything that queued up while the commit before was under way into the next one.

    A transaction that fails fails its own callers alone. `committed` is told what every log has grown by, once it is
    durable.
    """

    def __init__(
        self,
        database: Database,
        *,
        notary: Notary | None,
        committed: Callable[[str, Sequence[Sealed]], None],
        now: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._notary = notary
        self._committed = committed
        self._now = now
        self._queue: deque[_Entry] = deque()
        self._heads: dict[str, Head] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, drafts: Sequence[Draft], alongside: Alongside | None = None) -> list[Recorded]:
        """Wait until the drafts are durable, one behind the other in one transaction.

        With `alongside` the transaction is theirs alone, and fails with whatever that raises.

        If the caller is cancelled while its transaction is under way, the events may still be recorded.
        """
        if self._closed:
            raise Unavailable("the event log is closed", hint="open the database again")
        done: asyncio.Future[list[Recorded]] = asyncio.get_running_loop().create_future()
        self._queue.append(_Entry(drafts, done, alongside))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain(), name="skep event writer")
        return await done

    async def close(self) -> None:
        """Write what is queued and sign the end of every log that grew."""
        self._closed = True
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._notary is not None:
            await self._notary.attest(all_of_them=True)

    async def _drain(self) -> None:
        while batch := self._gather():
            # The outcome is a value here: whatever went wrong belongs to those who wait for this batch.
            (outcome,) = await asyncio.gather(self._commit(batch), return_exceptions=True)
            _settle(batch, outcome)
            if self._notary is not None:
                # These events are acknowledged. What cannot be signed now stays due, and close() raises.
                await asyncio.gather(self._notary.attest(), return_exceptions=True)
            # Callers that were just answered get to queue their next event before the next batch is taken.
            await asyncio.sleep(0)

    def _gather(self) -> list[_Entry]:
        batch: list[_Entry] = []
        count = size = 0
        while self._queue and count < BATCH_EVENTS and size < BATCH_BYTES:
            if batch and (batch[0].alongside or self._queue[0].alongside):
                break
            entry = self._queue.popleft()
            if entry.done.cancelled():
                continue
            batch.append(entry)
            count += len(entry.drafts)
            size += sum(draft.size_bytes for draft in entry.drafts)
        return batch

    async def _commit(self, batch: Sequence[_Entry]) -> list[list[Recorded]]:
        hive_ids = sorted({draft.hive_id for entry in batch for draft in entry.drafts})
        try:
            async with self._database.write() as connection:
                await self._create_heads(connection, hive_ids)
                heads, signed = await self._lock_heads(connection, hive_ids)
                if batch[0].alongside is not None:
                    await batch[0].alongside(connection)
                sealed = [self._seal(entry.drafts, heads) for entry in batch]
                await connection.execute(_INSERT, [each.row() for entry in sealed for each in entry])
                await connection.execute(_ADVANCE, [_advance(hive, heads[hive]) for hive in hive_ids])
        except IntegrityError as error:
            if batch[0].alongside is not None:
                raise
            raise ChainBroken(
                "the event log holds records beyond the end it states", hint="run: skep events verify"
            ) from error
        self._heads.update(heads)
        for hive_id in hive_ids:
            self._committed(hive_id, [each for entry in sealed for each in entry if each.draft.hive_id == hive_id])
            if self._notary is not None:
                self._notary.saw(hive_id, seq=heads[hive_id].seq, checkpoint_seq=signed[hive_id])
        return [[each.recorded() for each in entry] for entry in sealed]

    async def _create_heads(self, connection: AsyncConnection, hive_ids: Iterable[str]) -> None:
        """Make a head for each hive not seen before; all of them before any lock, so no two writers cross."""
        fresh = [{"hive_id": hive, "seq": 0, "hash": GENESIS} for hive in hive_ids if hive not in self._heads]
        if fresh:
            await connection.execute(self._database.insert(event_heads).on_conflict_do_nothing(), fresh)

    async def _lock_heads(
        self, connection: AsyncConnection, hive_ids: Sequence[str]
    ) -> tuple[dict[str, Head], dict[str, int]]:
        """Lock the heads, in order, until the commit: whoever appends to these hives comes after us."""
        rows = (await connection.execute(_LOCK, {"hives": hive_ids})).all()
        heads = {row.hive_id: await self._head(connection, row.hive_id, row.seq, row.hash) for row in rows}
        if len(heads) != len(hive_ids):
            self._heads.clear()
            missing = min(set(hive_ids) - set(heads))
            raise ChainBroken(f"the head of the log of {missing} is gone", hint="run: skep events verify")
        return heads, {row.hive_id: row.checkpoint_seq for row in rows}

    async def _head(self, connection: AsyncConnection, hive_id: str, seq: int, hash_: bytes) -> Head:
        known = self._heads.get(hive_id)
        if known is not None and known.seq == seq and known.hash == hash_:
            return known
        if seq == 0:
            return Head()
        statement = select(events.c.at).where(events.c.hive_id == hive_id, events.c.seq == seq)
        at = (await connection.execute(statement)).scalar_one_or_none()
        if at is None:
            raise ChainBroken(
                f"the log of {hive_id} ends before its head, number {seq}", hint="run: skep events verify"
            )
        return Head(seq, hash_, at)

    def _seal(self, drafts: Sequence[Draft], heads: dict[str, Head]) -> list[Sealed]:
        now = write_time(self._now())
        sealed = []
        for draft in drafts:
            head = heads[draft.hive_id]
            # A clock that steps back must not make a later event look earlier.
            sealed.append(draft.seal(head, max(now, head.at)))
            heads[draft.hive_id] = sealed[-1].head
        return sealed


def _advance(hive_id: str, head: Head) -> dict[str, object]:
    return {"hive": hive_id, "to_seq": head.seq, "to_hash": head.hash}


def _settle(batch: Sequence[_Entry], outcome: list[list[Recorded]] | BaseException) -> None:
    if isinstance(outcome, BaseException):
        for entry in batch:
            if not entry.done.done():
                entry.done.set_exception(outcome)
        return
    for entry, recorded in zip(batch, outcome, strict=True):
        if not entry.done.done():
            entry.done.set_result(recorded)
