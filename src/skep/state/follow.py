"""Wake those who follow a log as soon as it has grown, whichever process made it grow."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import select

from skep.state.database import Database
from skep.state.events import Recorded
from skep.state.record import Sealed
from skep.state.schema import event_heads

POLL_S = 0.05
#: The most that is kept at hand of one log that is followed.
TAIL_EVENTS = 256
TAIL_BYTES = 1024 * 1024


class Tail:
    """The newest records of one log, one behind the other, as far as this process appended them itself."""

    def __init__(self) -> None:
        self._records: deque[Sealed] = deque()
        self._bytes = 0

    def add(self, fresh: Sequence[Sealed]) -> None:
        if self._records and self._records[-1].head.seq + 1 != fresh[0].head.seq:  # another process was between
            self._records.clear()
            self._bytes = 0
        self._records.extend(fresh)
        self._bytes += sum(len(each.record) for each in fresh)
        while len(self._records) > TAIL_EVENTS or self._bytes > TAIL_BYTES:
            self._bytes -= len(self._records.popleft().record)

    def after(self, seq: int, end: int) -> list[Recorded] | None:
        """Return all from the one after `seq` to `end`; None if they are not all at hand."""
        if not self._records or self._records[0].head.seq > seq + 1 or self._records[-1].head.seq != end:
            return None
        return [each.recorded() for each in self._records if each.head.seq > seq]


class Watch:
    """Knows how far each followed log reaches.

    Appends of this process are told to it and wake at once. Those of others are seen by one small query for
    all followers together, every 50 ms and only while somebody waits. PRAGMA data_version and LISTEN/NOTIFY
    were left out: the one belongs to a single connection, the other makes PostgreSQL commit one transaction
    at a time, and a query on the heads is the same and cheap on both databases.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reach: dict[str, int] = {}
        self._waiting: dict[str, set[asyncio.Future[bool]]] = {}
        self._followers: Counter[str] = Counter()
        self._tails: dict[str, Tail] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def reach(self, hive_id: str) -> int:
        """Return the highest sequence number heard of, which is at most the highest there is."""
        return self._reach.get(hive_id, 0)

    @contextmanager
    def following(self, hive_id: str) -> Iterator[None]:
        """Keep what this process appends to a log at hand while somebody follows it."""
        self._followers[hive_id] += 1
        try:
            yield
        finally:
            self._followers[hive_id] -= 1
            if not self._followers[hive_id]:
                del self._followers[hive_id]
                self._tails.pop(hive_id, None)

    def at_hand(self, hive_id: str, seq: int) -> list[Recorded] | None:
        """Return all that was recorded after `seq`, if this process appended it lately; None if it has to be read."""
        tail = self._tails.get(hive_id)
        return None if tail is None else tail.after(seq, self.reach(hive_id))

    def appended(self, hive_id: str, fresh: Sequence[Sealed]) -> None:
        """Take note of what this process appended, once it is durable."""
        if hive_id in self._followers:
            self._tails.setdefault(hive_id, Tail()).add(fresh)
        self.grew(hive_id, fresh[-1].head.seq)

    def grew(self, hive_id: str, seq: int) -> None:
        if seq > self.reach(hive_id):
            self._reach[hive_id] = seq
            _wake(self._waiting.pop(hive_id, set()), still_open=True)

    async def beyond(self, hive_id: str, seq: int) -> bool:
        """Wait until the log reaches beyond `seq`; return False once the log is closed."""
        while not self._closed and self.reach(hive_id) <= seq:
            turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            waiting = self._waiting.setdefault(hive_id, set())
            waiting.add(turn)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._poll(), name="skep event watch")
            try:
                await turn
            finally:
                waiting.discard(turn)
                if not waiting and self._waiting.get(hive_id) is waiting:
                    del self._waiting[hive_id]
        return not self._closed

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for hive_id in list(self._waiting):
            _wake(self._waiting.pop(hive_id), still_open=False)

    async def _poll(self) -> None:
        while hive_ids := list(self._waiting):
            # The outcome is a value here: whatever went wrong belongs to those who wait.
            (outcome,) = await asyncio.gather(self._heads(hive_ids), return_exceptions=True)
            if isinstance(outcome, BaseException):
                for hive_id in hive_ids:
                    _fail(self._waiting.pop(hive_id, set()), outcome)
            else:
                for hive_id, seq in outcome:
                    self.grew(hive_id, seq)
            await asyncio.sleep(POLL_S)

    async def _heads(self, hive_ids: list[str]) -> list[tuple[str, int]]:
        heads = event_heads.c
        statement = select(heads.hive_id, heads.seq).where(heads.hive_id.in_(hive_ids))
        async with self._database.read() as connection:
            return [(row.hive_id, row.seq) for row in await connection.execute(statement)]


def _wake(waiting: set[asyncio.Future[bool]], *, still_open: bool) -> None:
    for turn in waiting:
        if not turn.done():
            turn.set_result(still_open)


def _fail(waiting: set[asyncio.Future[bool]], error: BaseException) -> None:
    for turn in waiting:
        if not turn.done():
            turn.set_exception(error)
