"""skep run carries a prompt to its reply, tells what happens on the way, and ends it on Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.typing import CTRL_C, Terminal, at_terminal
from tests.gateway.served import DEADLINE_S, Home, environment, eventually, furnish, runs


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, warm_scripts: Path) -> Home:
    """A home with a hive, a model that is a script, and no server."""
    return furnish(tmp_path_factory.mktemp("alone"), warm_scripts)


def test_the_reply_goes_to_stdout_and_what_happens_to_stderr(alone: Home) -> None:
    ran = alone.run("run", "count the lines")
    assert (ran.returncode, ran.stdout) == (0, "three lines\n"), ran.stderr
    said = ran.stderr
    assert "one task: something has to be run" in said
    assert "$ seq 3 -> exit 0 (" in said
    assert re.search(r"write counted: .* -> 5 bytes \(", said)
    assert "scripted: no model was asked" in said
    (day,) = alone.state.glob("hives/*/memory/*.md")
    assert "count the lines" in day.read_text(), "what follows a task is done before the command ends"


def test_a_prompt_from_stdin_that_fails_says_so_by_its_exit_code(alone: Home, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("give up")
    with (tmp_path / "prompt").open() as stdin:
        ran = alone.run("run", "-", stdin=stdin)
    assert (ran.returncode, ran.stdout) == (1, "it cannot be done\n")
    assert "failed" in ran.stderr


def test_a_mistake_is_named_and_nothing_is_begun(alone: Home) -> None:
    before = alone.done("task", "list", "--json")
    for words, says in (
        (("run", "x", "--hive", "nowhere"), "no hive 'nowhere'"),
        (("run", ""), "prompt"),
        (("run", "x", "--thread", "nonsense"), "thread"),
        (("task", "show", "../x"), "no task"),
        (("task", "list", "--status", "late"), "is no status"),
    ):
        ran = alone.run(*words)
        assert (ran.returncode, says in ran.stderr, "Traceback" in ran.stderr) == (2, True, False), ran.stderr
    assert alone.done("task", "list", "--json") == before


def test_a_task_without_a_follower_waits_for_one(alone: Home) -> None:
    task = json.loads(alone.done("run", "hello", "--no-follow", "--json"))
    assert task["status"] == "queued"
    assert alone.done("task", "follow", task["id"]) == "You said: hello"


def test_ctrl_c_ends_the_task(alone: Home) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "skep", "run", "sleep 300.75", "--json"],
        env=environment(alone.folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        numbers = []
        for line in process.stdout:
            event = json.loads(line)
            numbers.append(event["seq"])
            if event["type"] == "ruled":
                process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
        assert event["type"] == "task_ended"
        assert numbers == sorted(set(numbers))
    finally:
        process.kill()
        process.communicate()
    assert json.loads(alone.done("task", "show", event["task"], "--json"))["status"] == "cancelled"


def test_a_question_is_answered_at_the_terminal(alone: Home) -> None:
    with at_terminal(alone, "run", "ask at a terminal") as terminal:
        terminal.shows("Which colour? (red, blue)")
        terminal.type(b"\n\x01\n")
        terminal.shows("the answer has a character that is not text")
        terminal.type(b"blue\n")
        terminal.shows("it was")
        assert "blue" in terminal.shown
        assert terminal.process.wait(DEADLINE_S) == 0


def status(home: Home, terminal: Terminal) -> str:
    """Return how the task stands that was begun at a terminal."""
    (task,) = set(re.findall(r"task (tsk_\w+)", terminal.shown))
    found: str = json.loads(home.done("task", "show", task, "--json"))["status"]
    return found


def test_ctrl_c_ends_a_task_that_nobody_works_on_yet(alone: Home) -> None:
    with at_terminal(alone, "run", "sleep 300.625") as terminal:
        terminal.shows("task tsk_")  # the engine is only being started
        terminal.type(CTRL_C)
        assert terminal.process.wait(DEADLINE_S) == 130
        assert status(alone, terminal) == "cancelled"


def test_a_second_ctrl_c_leaves_the_end_of_the_task_on_record(alone: Home) -> None:
    with at_terminal(alone, "run", "sleep 300.875") as terminal:
        eventually(lambda: runs("sleep", "300.875"), "the command runs")
        terminal.type(CTRL_C)
        terminal.shows("ending the task")
        terminal.type(CTRL_C)
        assert terminal.process.wait(DEADLINE_S) == 130
        terminal.shows("left; tsk_")
        assert status(alone, terminal) in ("cancelling", "cancelled")
        assert "is on record as to be ended" in terminal.shown
