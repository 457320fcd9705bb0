"""Whether a server can work: what is looked at, told in words that anybody may read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from sqlalchemy import select

from skep.errors import SkepError, Unavailable
from skep.state.schema import accounts

if TYPE_CHECKING:
    from skep.app.engine import Engine
    from skep.state.database import Database

Check = Callable[[], Awaitable[None]]


def checks(database: Database, engine: Engine) -> Mapping[str, Check]:
    """Return a check for each part that work needs; one raises when its part is not well.

    Whoever asks need not be known, so where a database is and what it said goes to the log alone.
    """
    looked_up = _identity(database)

    async def answers() -> None:
        try:
            async with database.read() as connection:
                await connection.execute(select(accounts.c.id).limit(1))
        except SkepError as error:
            _note("database", error)
            raise Unavailable("the database does not answer", hint="see to it; the log says more") from error
        if _identity(database) != looked_up:
            raise Unavailable("the file of the database was removed or replaced", hint="start the server anew")

    async def works() -> None:
        try:
            engine.worker.check()
        except SkepError as error:
            _note("worker", error)
            raise

    async def holds() -> None:
        engine.sessions.ledger.check()

    return {"database": answers, "worker": works, "sessions": holds}


def _identity(database: Database) -> tuple[int, int] | None:
    """Say which file the database is in: one that was removed goes on to take what is written, and nobody finds it."""
    path = database.location.path
    if path is None:
        return None
    try:
        found = Path(path).stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _note(part: str, error: SkepError) -> None:
    structlog.get_logger("skep.app").warning("not_ready", part=part, error=str(error.__cause__ or error))
