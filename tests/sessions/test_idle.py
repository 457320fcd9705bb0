from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from skep.sessions.idle import Due, deleted_at, due
from skep.sessions.session import STATUSES, Session, Status
from skep.state.upkeep import USUAL, Upkeep

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
SESSION = Session("id", "bees", "hv-1", "cli:x", "active", BEGAN, BEGAN, BEGAN)


def after(**time: float) -> datetime:
    return BEGAN + timedelta(**time)


@pytest.mark.parametrize(
    ("status", "time", "expected"),
    [
        ("active", {"seconds": 299}, None),
        ("active", {"seconds": 300}, "stop"),
        ("paused", {"seconds": 300}, "stop"),
        ("stopped", {"seconds": 1799}, None),
        ("stopped", {"seconds": 1800}, "archive"),
        ("archived", {"days": 82.9}, None),
        ("archived", {"days": 83}, "warn"),
        ("creating", {"days": 999}, None),
        ("resuming", {"days": 999}, None),
        ("destroyed", {"days": 999}, None),
        ("error", {"days": 999}, None),
    ],
)
def test_each_status_has_its_time(status: Status, time: dict[str, float], expected: Due | None) -> None:
    assert due(replace(SESSION, status=status), USUAL, after(**time)) == expected


@pytest.mark.parametrize("status", STATUSES)
def test_what_is_busy_is_never_put_away(status: Status) -> None:
    assert due(replace(SESSION, status=status), USUAL, after(days=999), busy=True) is None


def test_use_puts_the_stop_off() -> None:
    assert due(replace(SESSION, active_at=after(seconds=200)), USUAL, after(seconds=400)) is None


def test_a_session_is_deleted_only_after_it_was_announced_long_enough() -> None:
    archived = replace(SESSION, status="archived")
    assert due(archived, USUAL, after(days=500)) == "warn"
    warned = replace(archived, warned_at=after(days=500))
    assert due(warned, USUAL, after(days=506.9)) is None
    assert due(warned, USUAL, after(days=507)) == "delete"


def test_coming_back_from_the_archive_starts_the_time_anew() -> None:
    returned = replace(SESSION, status="archived", unarchived_at=after(days=80))
    assert deleted_at(returned, USUAL) == after(days=170)
    assert due(returned, USUAL, after(days=100)) is None


def test_a_hive_can_choose_every_time() -> None:
    quick = Upkeep(stop_after_s=10, archive_after_s=20, delete_after_days=1)
    assert due(SESSION, quick, after(seconds=10)) == "stop"
    assert due(replace(SESSION, status="stopped"), quick, after(seconds=20)) == "archive"
    archived = replace(SESSION, status="archived")
    assert due(archived, quick, after(hours=21)) is None
    assert due(archived, quick, after(hours=22)) == "warn"
    assert due(replace(archived, warned_at=after(hours=22)), quick, after(hours=25)) == "delete"
