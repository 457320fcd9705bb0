"""A process that works on tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skep.state.database import Database
from skep.state.hives import Hives
from skep.state.leases import Leases
from skep.state.log import EventLog
from skep.tasks.tasks import Tasks

if TYPE_CHECKING:
    from skep.models.models import Models
    from skep.sessions.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is worked on at once; None sets no limit."""

    concurrent: int = 50
    concurrent_per_account: int = 8
    starts_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one task may use before it has to end with what it has; None sets no limit."""

    usd: float | None = 2.0
    steps: int = 50
    requests: int = 100
    tokens: int = 2_000_000
    seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a worker works with, put together by the program.

    `households` is the folder of the hives' own files (`<households>/<hive id>/memory/…`), `host` what this machine is
    called (`skep.sessions.controller.host_name`), `confidence` the least with which an answer is taken as it is.
    """

    database: Database
    log: EventLog
    hives: Hives
    leases: Leases
    sessions: Sessions
    models: Models
    host: str
    households: Path
    pace: Pace = Pace()
    bounds: Bounds = Bounds()
    confidence: float = 0.5
    approval_timeout_s: float = 3600.0


class Worker:
    """The engine in this process; `tasks` wakes it."""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks


@asynccontextmanager
async def open_worker(workshop: Workshop) -> AsyncIterator[Worker]:
    """Work on tasks in this process until the block ends; what is not done then goes on elsewhere, or next time."""
    raise NotImplementedError
    yield
