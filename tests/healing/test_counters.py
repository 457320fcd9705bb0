from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from skep.healing.counters import count
from skep.state.events import Event, Healed, Recorded, TaskEnded


def recorded(event: Event, task: str) -> Recorded:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return Recorded(
        hive_id="h", seq=1, at=at, actor="worker", account_id="default", task_id=task, event=event, hash=b""
    )


def met(task: str, failure: str, tier: Literal[1, 2, 3], rule: str) -> Recorded:
    return recorded(Healed(attempt=1, failure=failure, tier=tier, rule=rule, remedy="…", detail=""), task)


def ended(task: str, status: Literal["succeeded", "failed", "cancelled"]) -> Recorded:
    return recorded(TaskEnded(status=status, why=""), task)


LOG = [
    met("a", "rate_limit", 1, "rate_limit"),
    met("b", "tool_refused", 2, "reflection"),
    met("a", "rate_limit", 1, "rate_limit"),
    met("b", "tool_refused", 3, "note"),
    ended("a", "succeeded"),
    ended("b", "failed"),
    met("c", "tool_refused", 2, "reflection"),
    ended("c", "succeeded"),
    met("d", "rate_limit", 1, "rate_limit"),
    ended("d", "cancelled"),
    met("e", "loop", 2, "reflection"),
    ended("f", "succeeded"),
]


def test_remedies_are_counted_by_tier_rule_and_failure() -> None:
    counters = count(LOG)
    assert counters.by_tier == {1: 3, 2: 3, 3: 1}
    assert counters.by_rule == {"rate_limit": 3, "reflection": 3, "note": 1}
    assert counters.by_failure == {"rate_limit": 3, "tool_refused": 3, "loop": 1}


def test_the_heal_rate_is_the_share_of_ended_tasks_that_came_through() -> None:
    assert count(LOG).rates() == {"rate_limit": 1.0, "tool_refused": 0.5}


def test_nothing_counted_is_no_rate() -> None:
    assert count([]).rates() == {}
