"""SQLAlchemy engines, set up for durability on either database."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from skep.errors import Unavailable
from skep.state.driver import Connection as SqliteConnection
from skep.state.driver import connect
from skep.state.location import Location
from skep.state.revision import APPLICATION_ID, SCHEMA, check_file

BUSY_S = 5.0

_WRITER = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", "PRAGMA foreign_keys = ON")
_READER = ("PRAGMA query_only = ON",)

# A peer that vanished without a word is noticed within half a minute, and a session that was stopped inside a
# transaction gives its locks back.
_POSTGRESQL: dict[str, Any] = {
    "application_name": "skep",
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_POSTGRESQL_OPTIONS = (
    f"-c search_path={SCHEMA} -c lock_timeout={BUSY_S:.0f}s -c idle_in_transaction_session_timeout=60s"
)


def sqlite_engine(location: Location, *, writes: bool) -> AsyncEngine:
    """Make the engine that writes (each transaction takes the write lock at once) or the one that cannot."""
    # isolation_level None: the driver begins nothing by itself, so `_begin` below decides.
    arguments = {"timeout": BUSY_S, "isolation_level": None, "async_creator_fn": connect}
    engine = create_async_engine(location.url, connect_args=arguments)
    pragmas = _WRITER if writes else _READER

    @event.listens_for(engine.sync_engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(pragma)
        cursor.close()

    @event.listens_for(engine.sync_engine, "invalidate")
    def _roll_back(connection: Any, _record: object, _error: object) -> None:
        # A cancelled caller leaves a statement half read: SQLite would keep the transaction, and its lock, until the
        # last of those is collected.
        with suppress(asyncio.CancelledError, sqlite3.Error):
            connection.rollback()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:
        driver = connection.connection.driver_connection
        assert isinstance(driver, SqliteConnection)
        driver.begin(writes=writes)

    return engine


def postgresql_engine(location: Location) -> AsyncEngine:
    """Make the engine for PostgreSQL; what the URL's query says wins over Skep's defaults."""
    own = location.url.query
    arguments = {name: value for name, value in _POSTGRESQL.items() if name not in own}
    arguments["options"] = f"{_POSTGRESQL_OPTIONS} {own.get('options', '')}".strip()
    url = location.url.difference_update_query(["options"])
    try:
        return create_async_engine(url, connect_args=arguments, pool_pre_ping=True)
    except ImportError as error:
        hint = "pip install 'skep[postgres]'"
        raise Unavailable("the PostgreSQL driver is not installed", hint=hint) from error


def prepare_file(path: Path) -> None:
    """Make a file Skep's own, readable by its owner alone: the mark first, then the write-ahead log."""
    if check_file(path):
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    deadline = time.monotonic() + BUSY_S
    with closing(sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        while not _use_wal(connection, deadline):
            time.sleep(0.01)


def _use_wal(connection: sqlite3.Connection, deadline: float) -> bool:
    # SQLite does not wait for the lock that this one statement needs, so the wait is here.
    try:
        connection.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
            raise
        return False
    return True
