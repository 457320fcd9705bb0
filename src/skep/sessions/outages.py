"""Hives whose sandboxes cannot be had for a while: they go on without, and are told so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Delete, Update, delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import Unavailable
from skep.sessions.ledger import ACTOR
from skep.state.database import Database
from skep.state.events import OutageBegan, OutageEnded
from skep.state.hives import Hive
from skep.state.log import EventLog
from skep.state.record import read_time, write_time
from skep.state.schema import outages

#: How long sandboxes are tried for before a hive does without, and how often they are tried again then.
FLIP_AFTER = timedelta(seconds=60)
TRY_AGAIN = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class Outage:
    """Since when no sandbox can be had, and since when the hive does without."""

    since: datetime
    last_error: str
    flipped_at: datetime | None = None


class Outages:
    """The outages on record."""

    def __init__(self, database: Database, log: EventLog, *, now: Callable[[], datetime]) -> None:
        self._database = database
        self._log = log
        self._now = now
        #: When this process last could not have a sandbox, by hive.
        self._failed_at: dict[str, datetime] = {}

    async def of(self, hive: Hive) -> Outage | None:
        async with self._database.read() as connection:
            row = (await connection.execute(select(outages).where(outages.c.hive_id == hive.id))).one_or_none()
        if row is None:
            return None
        return Outage(read_time(row.since), row.last_error, read_time(row.flipped_at) if row.flipped_at else None)

    async def failed(self, hive: Hive, error: Unavailable) -> Outage:
        """Take note that a sandbox could not be had; return the outage as it is now."""
        known, now = await self.of(hive), self._now()
        lately, self._failed_at[hive.id] = self._failed_at.get(hive.id), now
        if known is not None and known.flipped_at is not None:
            return known
        mine = lately is not None and now - lately <= TRY_AGAIN
        if known is None or not (mine or now - known.since < 2 * FLIP_AFTER):
            # Nobody has tried for a while: one failure then and one now say nothing about the time in between.
            known = Outage(now, error.message)
            await self._note(hive, known)
        return await self._flip(hive, known, error) if now - known.since >= FLIP_AFTER else known

    async def over(self, hive: Hive) -> None:
        """Take note that a sandbox was had."""
        known = await self.of(hive)
        if known is None:
            return
        statement = delete(outages).where(outages.c.hive_id == hive.id)
        if known.flipped_at is None:
            async with self._database.write() as connection:
                await connection.execute(statement)
        else:
            await self._append(hive, OutageEnded(), statement)

    async def _note(self, hive: Hive, outage: Outage) -> None:
        row = {"since": write_time(outage.since), "last_error": outage.last_error}
        statement = self._database.insert(outages).values(hive_id=hive.id, **row)
        async with self._database.write() as connection:
            await connection.execute(statement.on_conflict_do_update(index_elements=[outages.c.hive_id], set_=row))

    async def _flip(self, hive: Hive, known: Outage, error: Unavailable) -> Outage:
        flipped = Outage(known.since, error.message, self._now())
        statement = (
            update(outages)
            .where(outages.c.hive_id == hive.id, outages.c.flipped_at.is_(None))
            .values(flipped_at=write_time(self._now()), last_error=error.message)
        )
        await self._append(hive, OutageBegan(since=write_time(known.since), message=error.message), statement)
        return flipped

    async def _append(self, hive: Hive, event: OutageBegan | OutageEnded, statement: Update | Delete) -> None:
        """Record an event with the change that it tells of, unless somebody else has made that change."""

        async def write(connection: AsyncConnection) -> None:
            if not (await connection.execute(statement)).rowcount:
                raise _AlreadyTold

        with suppress(_AlreadyTold):
            await self._log.append(event, hive_id=hive.id, account_id=hive.account_id, actor=ACTOR, alongside=write)


class _AlreadyTold(Exception):
    """Another process, or another thread of the hive, was faster."""
