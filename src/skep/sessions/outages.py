"""Hives whose sandboxes cannot be had for a while: they go on without, and are told so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import Unavailable
from skep.sessions.ledger import ACTOR
from skep.state.database import Database
from skep.state.events import OutageBegan, OutageEnded
from skep.state.hives import Hive
from skep.state.log import EventLog
from skep.state.record import read_time, write_time
from skep.state.schema import outages
from skep.state.writer import Alongside

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

    async def of(self, hive: Hive) -> Outage | None:
        async with self._database.read() as connection:
            row = (await connection.execute(select(outages).where(outages.c.hive_id == hive.id))).one_or_none()
        if row is None:
            return None
        return Outage(read_time(row.since), row.last_error, read_time(row.flipped_at) if row.flipped_at else None)

    async def failed(self, hive: Hive, error: Unavailable) -> Outage:
        """Take note that a sandbox could not be had; return the outage as it is now."""
        known = await self.of(hive)
        if known is None:
            await self._note(hive, error)
            known = Outage(self._now(), error.message)
        if known.flipped_at is None and self._now() - known.since >= FLIP_AFTER:
            return await self._flip(hive, known, error)
        return known

    async def over(self, hive: Hive) -> None:
        """Take note that a sandbox was had."""
        known = await self.of(hive)
        if known is None:
            return

        async def remove(connection: AsyncConnection) -> None:
            await connection.execute(delete(outages).where(outages.c.hive_id == hive.id))

        if known.flipped_at is None:
            async with self._database.write() as connection:
                await remove(connection)
        else:
            await self._append(hive, OutageEnded(), remove)

    async def _note(self, hive: Hive, error: Unavailable) -> None:
        row = {"hive_id": hive.id, "since": write_time(self._now()), "last_error": error.message}
        statement = self._database.insert(outages).values(row).on_conflict_do_nothing()
        async with self._database.write() as connection:
            await connection.execute(statement)

    async def _flip(self, hive: Hive, known: Outage, error: Unavailable) -> Outage:
        flipped = Outage(known.since, error.message, self._now())
        values = {"flipped_at": write_time(self._now()), "last_error": error.message}

        async def write(connection: AsyncConnection) -> None:
            await connection.execute(update(outages).where(outages.c.hive_id == hive.id).values(values))

        await self._append(hive, OutageBegan(since=write_time(known.since), message=error.message), write)
        return flipped

    async def _append(self, hive: Hive, event: OutageBegan | OutageEnded, write: Alongside) -> None:
        await self._log.append(event, hive_id=hive.id, account_id=hive.account_id, actor=ACTOR, alongside=write)
