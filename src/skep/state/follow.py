"""Wake those who follow a log as soon as it has grown, whichever process made it grow."""

from __future__ import annotations

import asyncio

from sqlalchemy import select

from skep.state.database import Database
from skep.state.schema import event_heads

POLL_S = 0.05


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
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def reach(self, hive_id: str) -> int:
        """Return the highest sequence number heard of, which is at most the highest there is."""
        return self._reach.get(hive_id, 0)

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
