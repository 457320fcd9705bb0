"""When a session that nobody uses is put away."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from skep.sessions.session import Session
from skep.state.upkeep import Upkeep

Due = Literal["stop", "archive", "warn", "delete"]

#: How long before its end a session is announced to be deleted, unless it is kept for less than ten times that.
NOTICE = timedelta(days=7)


def due(session: Session, upkeep: Upkeep, now: datetime, *, busy: bool = False) -> Due | None:
    """Say what is due for a session, at most one thing at a time. What is busy is never put away."""
    if busy:
        return None
    match session.status:
        case "active" | "paused":
            return "stop" if now - session.active_at >= timedelta(seconds=upkeep.stop_after_s) else None
        case "stopped":
            return "archive" if now - session.changed_at >= timedelta(seconds=upkeep.archive_after_s) else None
        case "archived":
            return _due_for_deletion(session, upkeep, now)
        case _:
            return None


def deleted_at(session: Session, upkeep: Upkeep) -> datetime:
    """Say when a session is to be deleted if it stays archived: counted from when it last came back or was used."""
    used_at = max(session.unarchived_at or session.created_at, session.active_at)
    return used_at + timedelta(days=upkeep.delete_after_days)


def _due_for_deletion(session: Session, upkeep: Upkeep, now: datetime) -> Due | None:
    end = deleted_at(session, upkeep)
    notice = min(NOTICE, timedelta(days=upkeep.delete_after_days) / 10)
    if session.warned_at is None:
        return "warn" if now >= end - notice else None
    return "delete" if now >= max(end, session.warned_at + notice) else None
