"""Sign the ends of logs as they grow, into the database and into the files beside the key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.state.checkpoint import Checkpoint, Signer
from skep.state.database import Database
from skep.state.record import write_time
from skep.state.schema import checkpoints, event_heads, events


class Notary:
    """Signs a checkpoint for a hive whenever its log has grown by `every` events.

    A hive whose log no longer holds what the file beside the key says is not signed again: signing would
    replace the evidence. Its appends go on, and verify names the fault.
    """

    def __init__(self, database: Database, signer: Signer, *, every: int, now: Callable[[], datetime]) -> None:
        self._database = database
        self._signer = signer
        self._every = every
        self._now = now
        self._behind: dict[str, int] = {}
        self._unstored: dict[str, Checkpoint] = {}

    def saw(self, hive_id: str, *, seq: int, checkpoint_seq: int) -> None:
        """Take note of how far a hive's log and its checkpoints reach."""
        # A note of checkpoints beyond the end is false, and must not keep the log from being signed.
        self._behind[hive_id] = seq - checkpoint_seq if checkpoint_seq <= seq else seq

    async def attest(self, *, all_of_them: bool = False) -> None:
        """Sign what has grown enough, or all that has grown at all."""
        least = 1 if all_of_them else self._every
        due = sorted(hive for hive, behind in self._behind.items() if behind >= least)
        if due:
            await self._sign(due)
        if self._unstored:
            await asyncio.to_thread(self._store)

    async def _sign(self, hive_ids: Iterable[str]) -> None:
        at = write_time(self._now())
        async with self._database.write() as connection:
            signed = [made for hive in hive_ids if (made := await self._signed(connection, hive, at=at))]
            for made in signed:
                await self._keep(connection, made)
        for hive_id in hive_ids:
            del self._behind[hive_id]
        self._unstored.update({made.hive_id: made for made in signed})

    async def _signed(self, connection: AsyncConnection, hive_id: str, *, at: str) -> Checkpoint | None:
        statement = select(event_heads).where(event_heads.c.hive_id == hive_id)
        head = (await connection.execute(statement.with_for_update())).one_or_none()
        # Another process may have signed this end meanwhile.
        if head is None or head.seq in (0, head.checkpoint_seq):
            return None
        if not await self._agrees_with_file(connection, hive_id):
            return None
        return self._signer.sign(hive_id, head.seq, head.hash, at=at)

    async def _agrees_with_file(self, connection: AsyncConnection, hive_id: str) -> bool:
        known = await asyncio.to_thread(self._signer.anchors.newest, hive_id)
        if known is None:
            return True
        statement = select(events.c.hash).where(events.c.hive_id == hive_id, events.c.seq == known.seq)
        return (await connection.execute(statement)).scalar_one_or_none() == known.hash

    async def _keep(self, connection: AsyncConnection, checkpoint: Checkpoint) -> None:
        await connection.execute(insert(checkpoints).values(asdict(checkpoint)))
        await connection.execute(
            update(event_heads).where(event_heads.c.hive_id == checkpoint.hive_id).values(checkpoint_seq=checkpoint.seq)
        )

    def _store(self) -> None:
        for hive_id, checkpoint in list(self._unstored.items()):
            self._signer.anchors.store(checkpoint)
            del self._unstored[hive_id]
