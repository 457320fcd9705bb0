"""One database, SQLite or PostgreSQL, with reads, writes and errors that look alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Table
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import DatabaseBusy, Unavailable
from skep.state import revision
from skep.state.engines import postgresql_engine, prepare_file, sqlite_engine
from skep.state.failures import reachable, translated
from skep.state.location import Dialect, Location

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

TURN_S = 30.0


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of a database from the outside; `revision` is None where there is none yet."""

    place: str
    dialect: Dialect
    revision: str | None
    head: str

    @property
    def current(self) -> bool:
        return self.revision == self.head


class Database:
    """A pool of connections to one database, used from one event loop.

    A read sees one snapshot and cannot write. A write is one transaction, durable when its block ends; on
    SQLite the writes of a process take turns here, in order, rather than polling for the file's lock.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self.dialect: Dialect = location.dialect
        self._turn = asyncio.Lock()
        if self.dialect == "sqlite":
            self.engine = sqlite_engine(location, writes=True)
            self._reader = sqlite_engine(location, writes=False)
        else:
            self.engine = postgresql_engine(location)
            self._reader = self.engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    @classmethod
    async def open(cls, url: str, *, migrate: bool = True) -> Database:
        """Open the database at `url`, bringing it to this program's schema when `migrate`.

        A foreign or a newer database is refused and left untouched; so is an older one unless `migrate`.
        """
        database = cls(Location.parse(url))
        try:
            await database._settle(migrate=migrate)
        except BaseException:
            await database.close()
            raise
        return database

    async def _settle(self, *, migrate: bool) -> None:
        before = await self.revision()
        if before == revision.HEAD:
            return
        if not migrate:
            raise Unavailable(
                f"{self.location} has schema {before or 'none'}, this Skep needs {revision.HEAD}",
                hint="run: skep state migrate",
            )
        await self.migrate()

    async def revision(self) -> str | None:
        """Read the schema revision, None where there is no database yet; writes nothing."""
        path = self.location.path
        with reachable(self.location):
            if path is not None and not revision.check_file(path):
                return None
        async with self.read() as connection:
            return await connection.run_sync(revision.stored, self.location)

    async def migrate(self) -> str | None:
        """Bring the schema to HEAD in one transaction; return the revision it had before."""
        await self.prepare()
        async with self.write() as connection:
            return await connection.run_sync(revision.upgrade, self.location)

    async def prepare(self) -> None:
        """Make the SQLite file if there is none, empty but marked as Skep's; PostgreSQL needs nothing."""
        path = self.location.path
        if path is not None:
            with reachable(self.location), translated(self.location):
                await asyncio.to_thread(prepare_file, path)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Give a connection that sees one snapshot and refuses to write."""
        with translated(self.location):
            async with self._reader.begin() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Give one transaction: committed and durable at the block's end, rolled back if the block raises.

        On SQLite it begins, and takes the file's write lock, with its first statement.
        """
        async with self._my_turn():
            with translated(self.location):
                async with self.engine.begin() as connection:
                    yield connection

    @asynccontextmanager
    async def _my_turn(self) -> AsyncIterator[None]:
        if self.dialect == "postgresql":
            yield
            return
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError as error:
            raise DatabaseBusy(
                f"no turn to write to {self.location} came within {TURN_S:.0f} s", hint="try again"
            ) from error
        try:
            yield
        finally:
            self._turn.release()

    def insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """Begin an INSERT that can go on with ON CONFLICT, which SQLAlchemy has per database alone."""
        if self.dialect == "sqlite":
            from sqlalchemy.dialects.sqlite import insert as insert_on_sqlite

            return insert_on_sqlite(table)
        from sqlalchemy.dialects.postgresql import insert as insert_on_postgresql

        return insert_on_postgresql(table)

    async def close(self) -> None:
        """Give every connection back; harmless when repeated."""
        await self._reader.dispose()
        await self.engine.dispose()


async def status(url: str) -> Status:
    """Look at the database at `url` without writing; refuse a foreign or a newer one."""
    database = Database(Location.parse(url))
    try:
        found = await database.revision()
    finally:
        await database.close()
    return Status(str(database.location), database.dialect, found, revision.HEAD)


async def migrate(url: str) -> Status:
    """Bring the database at `url` to this program's schema, creating it if need be; say what it was."""
    before = await status(url)
    database = await Database.open(url)
    await database.close()
    return before
