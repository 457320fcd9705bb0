"""Backup and restore, of a live database and across the two kinds of database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, MetaData, Table, exists, func, insert, select
from sqlalchemy.exc import OperationalError, StatementError
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import Conflict, Corrupt
from skep.state import revision
from skep.state.archive import (
    Archive,
    Manifest,
    Member,
    Meter,
    Progress,
    Rows,
    Tally,
    encode,
    open_archive,
    write_archive,
)
from skep.state.database import Database
from skep.state.location import Location
from skep.state.record import write_time
from skep.state.schema import metadata

# A record of the event log has at most a few mebibytes, so a batch fits into memory even at the worst.
BATCH_ROWS = 100


def _silent(_done: int, _total: int) -> None:
    pass


async def backup(database: Database, path: Path, *, progress: Progress = _silent) -> Manifest:
    """Write all of a database, as it is at one moment, to a new file; writers need not wait.

    The file appears under its name only when it is whole. An existing file is refused, not replaced.
    """
    with write_archive(path) as archive:
        async with database.read() as connection:
            meter = Meter(await _count(connection), progress)
            for table in metadata.sorted_tables:
                with archive.table(table.name, table.columns.keys()) as write:
                    await _read(connection, table, write, meter)
        return archive.finish(revision=revision.HEAD, created_at=write_time(datetime.now(UTC)))


async def restore(url: str, path: Path, *, progress: Progress = _silent) -> Manifest:
    """Fill the empty or absent database at `url` from a backup, all of it or nothing.

    The whole backup is checked before the database is touched, and what the database then holds is read back
    and compared with the backup before it is committed. A backup of an older schema is migrated on the way.
    `progress` counts every row three times: checked, written and compared.
    """
    with open_archive(path) as archive:
        meter = Meter(archive.manifest.rows * 3, progress)
        await asyncio.to_thread(archive.verify, meter)
        database = Database(Location.parse(url))
        try:
            # Refuses a foreign or a newer database before anything is made.
            await database.revision()
            await database.prepare()
            async with database.write() as connection:
                await _fill(connection, archive, database.location, meter)
        finally:
            await database.close()
        return archive.manifest


async def _fill(connection: AsyncConnection, archive: Archive, place: Location, meter: Meter) -> None:
    pairs = await connection.run_sync(_make_ready, archive, place)
    for member, table in pairs:
        await _write(connection, archive.rows(member), table, meter)
    for member, table in pairs:
        if await _read_back(connection, table, meter) != member:
            hint = "nothing was restored"
            raise Corrupt(f"{place} does not give {table.name} back as the backup has it", hint=hint)
    await connection.run_sync(revision.upgrade, place)


async def _write(connection: AsyncConnection, rows: Iterator[list[Any]], table: Table, meter: Meter) -> None:
    columns = table.columns.keys()
    while batch := [dict(zip(columns, row, strict=True)) for row in islice(rows, BATCH_ROWS)]:
        try:
            await connection.execute(insert(table), batch)
        except OperationalError:
            raise
        except StatementError as error:
            raise Corrupt(f"the backup has a row that {table.name} cannot hold", hint="nothing was restored") from error
        meter.add(len(batch))


async def _read_back(connection: AsyncConnection, table: Table, meter: Meter) -> Member:
    tally = Tally()
    await _read(connection, table, lambda rows: tally.add(encode(rows), rows=len(rows)), meter)
    return tally.member(table.name, table.columns.keys())


async def _read(connection: AsyncConnection, table: Table, take: Callable[[Rows], None], meter: Meter) -> None:
    statement = select(table).order_by(*table.primary_key.columns)
    result = await connection.stream(statement.execution_options(yield_per=BATCH_ROWS))
    try:
        async for rows in result.partitions():
            take(rows)
            meter.add(len(rows))
    finally:
        # `async with` would not do: it leaves the server's cursor open when the block raises.
        await result.close()


def _make_ready(connection: Connection, archive: Archive, place: Location) -> list[tuple[Member, Table]]:
    """Bring an empty database to the backup's schema and match the tables of both, parents first."""
    wanted = archive.manifest.revision
    before = revision.stored(connection, place)
    if before is not None and revision.REVISIONS.index(before) > revision.REVISIONS.index(wanted):
        raise Conflict(
            f"{place} has schema {before}, the backup {wanted}",
            hint="restore into a database that does not exist",
        )
    revision.upgrade(connection, place, to=wanted)
    tables = _reflect(connection)
    for table in tables:
        if connection.execute(select(exists().select_from(table))).scalar_one():
            raise Conflict(f"{place} is not empty: {table.name} has rows", hint="restore into an empty database")
    members = {member.table: member for member in archive.manifest.tables}
    shapes = {name: member.columns for name, member in members.items()}
    if shapes != {table.name: tuple(table.columns.keys()) for table in tables}:
        raise Corrupt(
            f"the backup {archive.path} does not have the tables of schema {wanted}",
            hint="use another copy; nothing was changed",
        )
    return [(members[table.name], table) for table in tables]


def _reflect(connection: Connection) -> list[Table]:
    # From the database and not from this program's schema: an older backup goes into older tables.
    found = MetaData()
    found.reflect(connection, only=lambda name, _: name.startswith("skep_") and name != revision.VERSION_TABLE)
    return found.sorted_tables


async def _count(connection: AsyncConnection) -> int:
    total = 0
    for table in metadata.sorted_tables:
        total += (await connection.execute(select(func.count()).select_from(table))).scalar_one()
    return total
