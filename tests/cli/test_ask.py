"""skep run carries a prompt to its reply, tells what happens on the way, and ends it on Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gateway.served import DEADLINE_S, Home, environment, eventually, furnish


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
    assert "write counted -> 5 bytes (" in said
    assert "scripted: no model was asked" in said


def test_events_come_as_lines_of_json_for_a_program(alone: Home) -> None:
    ran = alone.run("run", "count for a program", "--hive", "garden", "--json")
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    assert (events[0]["type"], events[-1]["type"]) == ("prompted", "task_ended")
    assert [one["seq"] for one in events] == sorted({one["seq"] for one in events})


def test_a_prompt_is_read_from_stdin(alone: Home, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt"
    prompt.write_text("hello from a file")
    with prompt.open() as stdin:
        assert alone.run("run", "-", stdin=stdin).stdout == "You said: hello from a file\n"


def test_a_task_that_fails_says_so_by_its_exit_code(alone: Home) -> None:
    ran = alone.run("run", "give up")
    assert (ran.returncode, "failed" in ran.stderr) == (1, True), ran.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "x", "--hive", "nowhere"), "no hive 'nowhere'"),
        (("run", ""), "prompt"),
        (("run", "x", "--thread", "nonsense"), "thread"),
        (("task", "show", "../x"), "no task"),
        (("task", "list", "--status", "late"), "is no status"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_begun(alone: Home, words: tuple[str, ...], says: str) -> None:
    before = alone.done("task", "list", "--json")
    ran = alone.run(*words)
    assert (ran.returncode, says in ran.stderr, "Traceback" in ran.stderr) == (2, True, False), ran.stderr
    assert alone.done("task", "list", "--json") == before


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
        for line in process.stdout:
            event = json.loads(line)
            if event["type"] == "ruled":
                process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
    finally:
        process.kill()
        process.communicate()
    assert json.loads(alone.done("task", "show", event["task"], "--json"))["status"] == "cancelled"


def test_a_question_is_answered_at_the_terminal(alone: Home) -> None:
    near, far = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "skep", "run", "ask at a terminal"],
        env={**environment(alone.folder), "TERM": "dumb"},
        stdin=far,
        stdout=far,
        stderr=far,
    ) as process:
        os.close(far)
        shown = ""

        def has(text: str) -> bool:
            nonlocal shown
            shown += os.read(near, 4096).decode()
            return text in shown

        try:
            eventually(lambda: has("Which colour? (red, blue)"), "the question")
            os.write(near, b"blue\n")
            eventually(lambda: has("blue") and "it was" in shown, "the reply")
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            os.close(near)
