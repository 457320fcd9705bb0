"""The one place where a driver's error becomes one of Skep's."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from skep.errors import Corrupt, DatabaseBusy, SkepError, StorageFull, Unavailable

_KEEP = "stop every Skep process, copy the database aside, then restore the last backup"
_ROOM = "free some space and try again; what was acknowledged is safe"
_BUSY = "try again; if it lasts, find the process that keeps a transaction open"
_FOLDER = "check that the folder exists and that you may read and write it"
_SERVER = "check that the server runs and that state_url is right, then try again"

_HELD = (DatabaseBusy, "another process holds {place}", _BUSY)
_FULL = (StorageFull, "no room is left for {place}", _ROOM)
_CLOSED = (Unavailable, "{place} cannot be opened", _FOLDER)
_DAMAGED = (Corrupt, "{place} is damaged: {cause}", _KEEP)
_SQLITE: dict[int, tuple[type[SkepError], str, str]] = {
    sqlite3.SQLITE_BUSY: _HELD,
    sqlite3.SQLITE_LOCKED: _HELD,
    sqlite3.SQLITE_FULL: _FULL,
    # A shared-memory file that cannot grow reports an input/output error where a table reports "full".
    sqlite3.SQLITE_IOERR_SHMSIZE: _FULL,
    sqlite3.SQLITE_READONLY: (
        Unavailable,
        "{place} cannot be written",
        "make the file and its folder writable",
    ),
    sqlite3.SQLITE_CANTOPEN: _CLOSED,
    sqlite3.SQLITE_PERM: _CLOSED,
    sqlite3.SQLITE_IOERR: (
        Unavailable,
        "the disk failed under {place}: {cause}",
        "check the disk, then try again",
    ),
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
}

_LOCKED = (DatabaseBusy, "another transaction holds rows of {place}", _BUSY)
_REFUSED = (Unavailable, "{place} refused: {cause}", _SERVER)
_POSTGRESQL: dict[str, tuple[type[SkepError], str, str]] = {
    "55P03": _LOCKED,
    "40001": _LOCKED,
    "40P01": _LOCKED,
    "53100": (StorageFull, "the server has no room left for {place}", _ROOM),
    "25006": (Unavailable, "{place} takes no writes", "connect to the primary, not to a standby"),
    "XX001": _DAMAGED,
    "XX002": _DAMAGED,
    "42501": (
        Unavailable,
        "the role may not do this in {place}: {cause}",
        "let the role own the schema skep",
    ),
    "3D000": (Unavailable, "there is no database at {place}", "create it with createdb, then try again"),
    # The classes: connection, identity, resources, an operator's hand, the system below.
    "08": _REFUSED,
    "28": _REFUSED,
    "53": _REFUSED,
    "57": _REFUSED,
    "58": _REFUSED,
}
_LOST = (Unavailable, "no connection to {place}: {cause}", _SERVER)


@contextmanager
def translated(place: object) -> Iterator[None]:
    """Raise Skep's errors for the driver's, naming `place`.

    A broken constraint passes as SQLAlchemy's IntegrityError: only the caller knows what it means.
    """
    try:
        yield
    except IntegrityError:
        raise
    except PoolTimeout as error:
        raise DatabaseBusy(f"no connection to {place} is free", hint=_BUSY) from error
    except (DBAPIError, sqlite3.Error) as error:
        found = _look_up(error)
        if found is None:
            raise
        kind, message, hint = found
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise kind(message.format(place=place, cause=str(cause).strip()), hint=hint) from error


def _look_up(error: DBAPIError | sqlite3.Error) -> tuple[type[SkepError], str, str] | None:
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        # Errors of the Python wrapper itself carry no code.
        code = getattr(cause, "sqlite_errorcode", 0)
        return _SQLITE.get(code) or _SQLITE.get(code & 0xFF)
    state: str | None = getattr(cause, "sqlstate", None)
    if state is not None:
        return _POSTGRESQL.get(state) or _POSTGRESQL.get(state[:2])
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return _LOST if lost or type(cause).__name__ in ("OperationalError", "ConnectionTimeout") else None


@contextmanager
def reachable(place: object) -> Iterator[None]:
    """Raise Skep's errors for the file system's, naming `place`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no room is left for {place}", hint=_ROOM) from error
        raise Unavailable(f"{place} cannot be opened: {error.strerror}", hint=_FOLDER) from error
