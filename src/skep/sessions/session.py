"""A session as it is on record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, get_args

Status = Literal["creating", "active", "resuming", "paused", "stopped", "archived", "destroyed", "error"]
STATUSES: tuple[Status, ...] = get_args(Status)

#: Those in which some process may be running its sandbox.
RUNNING: frozenset[Status] = frozenset(("creating", "active", "resuming", "paused"))

#: Those in which there is a computer to be put away in time.
KEPT: frozenset[Status] = RUNNING | {"stopped", "archived"}

#: Where each status can lead. What is not here is a defect of Skep's, and is refused.
WAYS: Mapping[Status, frozenset[Status]] = {
    "creating": frozenset(("active", "resuming", "error", "stopped", "destroyed", "creating")),
    "active": frozenset(("creating", "resuming", "paused", "stopped", "error", "destroyed")),
    "resuming": frozenset(("active", "creating", "error", "stopped", "archived", "resuming", "destroyed")),
    "paused": frozenset(("active", "creating", "resuming", "stopped", "error", "destroyed")),
    "stopped": frozenset(("creating", "resuming", "archived", "error", "destroyed")),
    "archived": frozenset(("creating", "resuming", "stopped", "error", "destroyed")),
    "destroyed": frozenset(("creating",)),
    "error": frozenset(("creating", "resuming", "stopped", "archived", "error", "destroyed")),
}


@dataclass(frozen=True, slots=True)
class Session:
    """The durable binding of a key to its workspace; `id` is the id of both."""

    id: str
    account_id: str
    hive_id: str
    key: str
    status: Status
    created_at: datetime
    changed_at: datetime
    active_at: datetime
    #: How often a sandbox was started for it.
    generation: int = 0
    #: Grows with every controller that takes it over.
    token: int = 0
    host: str | None = None
    controller: str | None = None
    archive: str | None = None
    resume_fail_count: int = 0
    last_error: str | None = None
    healthy_at: datetime | None = None
    unarchived_at: datetime | None = None
    warned_at: datetime | None = None
    rooms: Mapping[str, int] = field(default_factory=dict)
