"""The one place where a driver's error becomes one of Skep's."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from skep.errors import Corrupt, DatabaseBusy, SkepError, StorageFull, Unavailable

_KEEP = "stop every Skep process, copy the database aside, then restore the last backup"
_ROOM = "free some space and try again; what was acknowledged is safe"
_BUSY = "try again; if it lasts, find the process that keeps a transaction open"


@contextmanager
def translated(place: object) -> Iterator[None]:
    """Raise Skep's errors for the driver's, naming `place`; broken constraints pass as IntegrityError."""
    try:
        yield
    except IntegrityError:
        raise
    except PoolTimeout as error:
        raise DatabaseBusy(f"no free connection to {place}", hint=_BUSY) from error
    except (DBAPIError, sqlite3.Error) as error:
        ours = _translate(error, place)
        if ours is None:
            raise
        raise ours from error


def _translate(error: DBAPIError | sqlite3.Error, place: object) -> SkepError | None:
    cause: BaseException | None = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        return _from_sqlite(cause, place)
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return _from_postgresql(cause, place, lost=lost)


def _from_sqlite(cause: sqlite3.Error, place: object) -> SkepError | None:
    code = getattr(cause, "sqlite_errorcode", None)
    if code is None:
        return None
    # A shared-memory file that cannot grow reports an input/output error where a table would report "full".
    if code == sqlite3.SQLITE_IOERR_SHMSIZE:
        return StorageFull(f"no room left for {place}", hint=_ROOM)
    match code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return DatabaseBusy(f"another process holds {place}", hint=_BUSY)
        case sqlite3.SQLITE_FULL:
            return StorageFull(f"no room left for {place}", hint=_ROOM)
        case sqlite3.SQLITE_READONLY:
            return Unavailable(f"{place} cannot be written", hint="make the file and its folder writable")
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            hint = "check that the folder exists and that you may read and write it"
            return Unavailable(f"{place} cannot be opened", hint=hint)
        case sqlite3.SQLITE_IOERR:
            return Unavailable(
                f"the disk failed under {place}: {cause}", hint="check the disk, then try again"
            )
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return Corrupt(f"{place} is damaged: {cause}", hint=_KEEP)
    return None


def _from_postgresql(cause: BaseException | None, place: object, *, lost: bool) -> SkepError | None:
    state: str | None = getattr(cause, "sqlstate", None)
    match state or "":
        case "55P03" | "40001" | "40P01":
            return DatabaseBusy(f"another transaction holds rows of {place}", hint=_BUSY)
        case "53100":
            return StorageFull(f"the server has no room left for {place}", hint=_ROOM)
        case "25006":
            return Unavailable(f"{place} takes no writes", hint="connect to the primary, not to a standby")
        case "XX001" | "XX002":
            return Corrupt(f"{place} is damaged: {cause}", hint=_KEEP)
        case "42501":
            return Unavailable(
                f"the role may not do this in {place}: {cause}", hint="grant it the schema skep"
            )
        case "3D000":
            return Unavailable(
                f"there is no database {place}", hint="create it with createdb, then try again"
            )
        case code if code[:2] in ("08", "28", "53", "57", "58"):
            return Unavailable(
                f"{place} refused: {cause}", hint="check that the server runs and the address is right"
            )
    if lost or (state is None and type(cause).__name__ in ("OperationalError", "ConnectionTimeout")):
        return Unavailable(
            f"no connection to {place}: {cause}", hint="check that the server runs, then try again"
        )
    return None
