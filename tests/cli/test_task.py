"""What happens in a task is told in lines that a person can read."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from skep.cli.storyline import Story, act, outcome, spent
from skep.state.events import Classified, Event, Healed, Observed, Planned, Proposed, Recorded, Reflected, TaskStarted
from skep.tasks.task import Task

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TASK = Task(
    "tsk_a", "default", "hv-a", "cli:default", "hello", "succeeded", NOON, "tsk_a", started_at=NOON, ended_at=NOON
)


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ({"kind": "run_command", "command": "make\n test"}, "$ make test"),
        ({"kind": "run_python", "code": "x = 1"}, "python: x = 1"),
        ({"kind": "write_file", "path": "a.txt", "content": "a\nb"}, "write a.txt: a b"),
        ({"kind": "use_skill", "skill": "hive/post", "script": "send"}, "skill hive/post send"),
        ({"kind": "browse", "act": "navigate", "url": "http://x"}, "browser: navigate http://x"),
        ({"kind": "run_tests", "paths": ["tests"]}, "tests: tests"),
        (
            {"kind": "install_packages", "ecosystem": "node", "names": ["pear", "plum@2"]},
            "install node packages: pear plum@2",
        ),
        ({"kind": "something_new", "more": 1}, "something_new"),
    ],
)
def test_an_act_is_told_in_one_line(action: dict[str, Any], told: str) -> None:
    assert act(action) == told


@pytest.mark.parametrize(
    ("observation", "told"),
    [
        ({"kind": "command_ended", "exit_code": 2, "timed_out": True}, ("exit 2, out of time", False)),
        ({"kind": "tests_ran", "exit_code": 1, "passed": 3, "failed": 1}, ("exit 1, 3 passed, 1 failed", False)),
        ({"kind": "skill_ran", "exit_code": 0, "status": 200}, ("exit 0, status 200", True)),
        ({"kind": "file_written", "size": 1200}, ("1,200 bytes", True)),
        ({"kind": "file_read", "text": "", "picture": "/workspace/a.png"}, ("a picture", True)),
        ({"kind": "packages_installed", "versions": {"pear": "1.0", "plum": "2"}}, ("pear 1.0, plum 2", True)),
        ({"kind": "packages_installed", "versions": {}, "note": "there already"}, ("there already", True)),
        ({"kind": "refused", "why": "no"}, ("not allowed: no", False)),
        ({"kind": "trouble", "failure": "tool_timeout", "message": "too long"}, ("tool_timeout: too long", False)),
        ({"kind": "answered", "answer": "", "answered": False}, ("no answer", False)),
        ({"kind": "something_new"}, ("done", True)),
    ],
)
def test_what_came_of_an_act_is_told_in_a_few_words(observation: dict[str, Any], told: tuple[str, bool]) -> None:
    assert outcome(observation) == told


def test_a_story_tells_of_parts_acts_and_healing_as_they_come(capfd: pytest.CaptureFixture[str]) -> None:
    story = Story(TASK)
    happened: list[tuple[str, Event]] = [
        ("tsk_a", TaskStarted(worker="w", start=2)),
        ("tsk_a", Classified(kind="many", why="two things")),
        ("tsk_a", Planned(tasks=({"id": "tsk_b", "title": "sow", "after": []},))),
        ("tsk_b", Proposed(run="r", step=1, call="c", action={"kind": "run_command", "command": "dig \x1b[31m"})),
        ("tsk_b", Observed(run="r", step=1, call="c", observation={"kind": "command_ended", "exit_code": 0})),
        ("tsk_b", Healed(attempt=1, failure="tool_timeout", tier=1, rule="r", remedy="DoubleTimeout", detail="60 s")),
        ("tsk_b", Reflected(attempt=1, note="dig deeper", check="exit 1")),
    ]
    for number, (task, event) in enumerate(happened):
        at = NOON + timedelta(seconds=number)
        story.tell(Recorded("hv-a", number, at, "worker", "default", task, event, b""))
    assert capfd.readouterr().err.splitlines() == [
        "  taken up again by another worker, start 2",
        "  several tasks: two things",
        "  1. sow",
        "  [sow] $ dig \\x1b[31m -> exit 0 (1.0 s)",
        "  [sow] healing, tier 1: tool_timeout -> DoubleTimeout: 60 s",
        "  [sow] reflected on exit 1: dig deeper",
    ]


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (TASK, "0.0 s, 0 tokens, $0.0000"),
        (
            replace(TASK, started_at=None, usd=0.5, unpriced=2, tokens=1234),
            "1,234 tokens, $0.5000, 2 calls of unknown price",
        ),
        (replace(TASK, scripted=True), "0.0 s, 0 tokens, scripted: no model was asked"),
    ],
)
def test_what_cannot_be_priced_is_told_and_not_counted_as_nothing(task: Task, told: str) -> None:
    assert spent(task) == told
