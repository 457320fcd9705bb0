"""Fixtures for the tests of sessions: a hive on record, and controllers that could run its computers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.sessions.yard import prepare_home

from skep.sandbox.erase import erase
from skep.sessions.controller import Controller
from skep.sessions.key import session_id
from skep.sessions.ledger import Ledger
from skep.sessions.session import Session
from skep.state.accounts import Accounts
from skep.state.database import Database
from skep.state.hives import Hive, Hives
from skep.state.leases import Leases
from skep.state.log import EventLog

MakeLedger = Callable[[str], Awaitable[Ledger]]


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_(self, **time: float) -> None:
        self.now += timedelta(**time)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Give the folder that all processes of one host share."""
    home = prepare_home(tmp_path / "home")
    yield home
    erase(str(home), home.stat().st_ino)  # the kernel leaves folders there that even their owner may not read


@pytest.fixture
async def log(database: Database) -> AsyncIterator[EventLog]:
    log = EventLog(database)
    yield log
    await log.close()


@pytest.fixture
async def hive(database: Database, log: EventLog) -> Hive:
    await Accounts(database).create("bees")
    return await Hives(database, log).create("garden", account_id="bees", actor="me")


@pytest.fixture
async def make_ledger(database: Database, log: EventLog, clock: Clock) -> AsyncIterator[MakeLedger]:
    """Give ledgers of controllers on hosts that the test names."""
    started: list[Controller] = []

    async def make(host: str) -> Ledger:
        started.append(await Controller.start(Leases(database), host))
        return Ledger(database, log, started[-1], now=clock)

    yield make
    for controller in started:
        await controller.stop()


@pytest.fixture
def wanted(hive: Hive, clock: Clock) -> Session:
    key = "cli:default"
    return Session(
        id=session_id(hive.account_id, hive.id, key),
        account_id=hive.account_id,
        hive_id=hive.id,
        key=key,
        status="creating",
        created_at=clock(),
        changed_at=clock(),
        active_at=clock(),
    )
