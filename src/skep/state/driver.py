"""SQLite for SQLAlchemy with one trip to the connection's thread for each statement, and none for what cannot wait.

aiosqlite makes a trip for every call: to get a cursor, to run a statement, to fetch, to close, to begin and to end. A
trip wakes two threads and takes longer than most of what Skep asks of the file.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import aiosqlite

#: Rows that come with a statement; more than these are fetched as they are asked for.
FIRST_ROWS = 1000

Row = tuple[Any, ...]


class Connection(aiosqlite.Connection):
    """A connection whose transactions begin with their first statement, in the same trip."""

    def __init__(self, connector: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connector, iter_chunk_size=FIRST_ROWS)
        self._thread.daemon = True
        self._begin: str | None = None
        #: Whether the thread was asked to begin a transaction, and not yet to end it.
        self._open = False
        self._writes = False

    def begin(self, *, writes: bool) -> None:
        """Have the next statement begin a transaction; one that writes takes the file's write lock with that."""
        self._begin = "BEGIN IMMEDIATE" if writes else "BEGIN"
        self._writes = writes

    def cursor(self) -> Cursor:  # type: ignore[override]  # SQLAlchemy wants no more than this has
        return Cursor(self)

    async def commit(self) -> None:
        self._begin = None
        if not self._open:
            return
        if self._writes:
            await super().commit()
        else:
            # The end of a read waits for nothing, and the thread is idle.
            self._conn.commit()
        self._open = False

    async def rollback(self) -> None:
        self._begin = None
        if self._open:
            await super().rollback()
            self._open = False

    async def run(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """Do something in the thread, in the transaction that is due to begin."""
        begin, self._begin = self._begin, None
        # Before it is: whoever is cancelled meanwhile must not take it for a connection without a transaction.
        self._open = self._open or begin is not None
        return await self._execute(partial(_run, begin, work, self._conn))  # type: ignore[no-untyped-call]


class Cursor:
    """One statement and what came of it, as far as SQLAlchemy asks."""

    arraysize = 1

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: deque[Row] = deque()
        #: Where the rest is, if there is more than the first rows.
        self._rest: sqlite3.Cursor | None = None
        self.description: Any = None
        self.rowcount = -1
        self.lastrowid: int | None = None

    async def __aenter__(self) -> Self:
        return self

    async def execute(self, operation: str, parameters: Sequence[Any] = ()) -> Self:
        return await self._run(lambda cursor: cursor.execute(operation, parameters))

    async def executemany(self, operation: str, parameters: Iterable[Sequence[Any]]) -> Self:
        return await self._run(lambda cursor: cursor.executemany(operation, parameters))

    async def _run(self, statement: Callable[[sqlite3.Cursor], object]) -> Self:
        await self._connection.run(partial(self._take, statement))
        return self

    def _take(self, statement: Callable[[sqlite3.Cursor], object], connection: sqlite3.Connection) -> None:
        cursor = connection.cursor()
        try:
            statement(cursor)
            self._rows = deque(cursor.fetchmany(FIRST_ROWS))
        except BaseException:
            cursor.close()
            raise
        self.description, self.rowcount, self.lastrowid = cursor.description, cursor.rowcount, cursor.lastrowid
        if len(self._rows) < FIRST_ROWS:
            cursor.close()
        else:
            self._rest = cursor

    async def fetchone(self) -> Row | None:
        rows = await self.fetchmany(1)
        return rows[0] if rows else None

    async def fetchmany(self, size: int | None = None) -> list[Row]:
        wanted = size or self.arraysize
        if self._rest is not None and len(self._rows) < wanted:
            rest = self._rest
            self._rows.extend(await self._connection.run(lambda _: rest.fetchmany(wanted)))
        return [self._rows.popleft() for _ in range(min(wanted, len(self._rows)))]

    async def fetchall(self) -> list[Row]:
        if (rest := self._rest) is not None:
            self._rows.extend(await self._connection.run(lambda _: rest.fetchall()))
        rows = list(self._rows)
        self._rows.clear()
        return rows

    async def close(self) -> None:
        self._rows.clear()
        rest, self._rest = self._rest, None
        if rest is not None:
            await self._connection.run(lambda _: rest.close())


def connect(path: str, **options: Any) -> Connection:
    """Return a connection to open by awaiting it."""
    return Connection(partial(sqlite3.connect, path, **{**options, "check_same_thread": False}))


def _run(begin: str | None, work: Callable[[sqlite3.Connection], Any], connection: sqlite3.Connection) -> Any:
    if begin is not None:
        connection.execute(begin).close()
    return work(connection)
