"""The program put together: one database, one log, and what works on them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from skep.config import Change, ConfigWatch, Paths, Settings
from skep.errors import ConfigInvalid
from skep.state.accounts import Accounts
from skep.state.checkpoint import Signer
from skep.state.database import Database
from skep.state.flags import Rollouts
from skep.state.hives import Hives
from skep.state.leases import Leases
from skep.state.location import Location
from skep.state.log import EventLog


@dataclass(frozen=True, slots=True)
class Program:
    """Everything a command or a server works with; `settings` are always those in effect."""

    paths: Paths
    config: ConfigWatch
    database: Database
    signer: Signer
    log: EventLog
    accounts: Accounts
    hives: Hives
    rollouts: Rollouts
    leases: Leases

    @property
    def settings(self) -> Settings:
        return self.config.settings


def signing_key(paths: Paths) -> Path:
    """Say where the key is that signs the ends of event logs."""
    return paths.home / "keys" / "events.pem"


def checkpoints_folder(paths: Paths, database: Database) -> Path:
    """Say where the signed ends of a database's logs are kept: apart for each, so that none is missed in another."""
    keys = signing_key(paths).parent
    if database.location == Location.parse(paths.default_state_url):
        return keys / "checkpoints"
    return keys / f"checkpoints-{hashlib.sha256(str(database.location).encode()).hexdigest()[:16]}"


def state_url(paths: Paths, settings: Settings) -> str:
    return settings.state_url or paths.default_state_url


@asynccontextmanager
async def open_program(paths: Paths, settings: Settings) -> AsyncIterator[Program]:
    """Open the database and start the log; at the end write what is queued and close both.

    While the block runs, a changed config.json is noticed: a valid one takes effect, another is logged.
    """
    database = await Database.open(state_url(paths, settings))
    structlog.get_logger("skep.app").debug("opened", database=str(database.location), config=str(paths.config))
    try:
        anchors = checkpoints_folder(paths, database)
        signer = await asyncio.to_thread(Signer.open, signing_key(paths), anchors=anchors)
        log = EventLog(database, signer=signer)
        config = ConfigWatch(paths, settings, applied=_log_change, refused=_log_refusal)
        watching = asyncio.create_task(config.run(), name="skep config watch")
        try:
            yield Program(
                paths=paths,
                config=config,
                database=database,
                signer=signer,
                log=log,
                accounts=Accounts(database),
                hives=Hives(database, log),
                rollouts=Rollouts(database),
                leases=Leases(database),
            )
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            await log.close()
    finally:
        await database.close()


def _log_change(change: Change) -> None:
    log = structlog.get_logger("skep.config")
    log.info("config_applied", changed=change.changed)
    if change.needs_restart:
        log.warning("config_needs_restart", fields=change.needs_restart)


def _log_refusal(error: ConfigInvalid) -> None:
    structlog.get_logger("skep.config").error("config_refused", problem=error.message, hint=error.hint)
