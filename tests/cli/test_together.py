"""Several commands work in one workspace at once: the first one holds it, and the others join it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

Ran = subprocess.CompletedProcess[str]
Cli = Callable[..., Ran]

DEADLINE_S = 60.0


@contextmanager
def spawned(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command as a program of its own, and let nothing of it outlive the test."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "skep", *words]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def holder(*options: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in the garden that is up until its input ends."""
    script = "touch /tmp/mine; echo up; cat > /dev/null; echo down"
    with spawned("exec", "-H", "garden", *options, "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    return out


def test_a_second_command_joins_the_first_in_one_computer(garden: Cli, program: Cli) -> None:
    with holder() as first:
        second = program("exec", "-H", "garden", "--", "sh", "-c", "ls /tmp/mine && echo watered >> bed; exit 3")
        assert (second.returncode, second.stdout) == (3, "/tmp/mine\n")
        assert program("files", "get", "bed", "-", "-H", "garden").stdout == "sown\nwatered\n"
        assert finish(first) == "down\n"


def test_a_holder_that_is_done_waits_for_its_guests(garden: Cli) -> None:
    script = "echo in; cat > /dev/null; cat bed"
    with holder() as first, spawned("exec", "-H", "garden", "--", "sh", "-c", script) as guest:
        assert guest.stdout is not None
        assert guest.stdout.readline() == "in\n"
        assert first.stdin is not None and first.stdout is not None
        first.stdin.close()
        assert first.stdout.readline() == "down\n"
        assert finish(guest) == "sown\n"
        assert first.wait(DEADLINE_S) == 0


def test_the_first_commands_of_a_hive_make_its_workspace_once(cli: Cli) -> None:
    cli("hive", "create", "garden")
    with ExitStack() as running:
        words = ("exec", "-H", "garden", "--", "sh", "-c")
        started = [running.enter_context(spawned(*words, f"echo {n} > note-{n}")) for n in range(3)]
        for process in started:
            finish(process)
    assert cli("exec", "-H", "garden", "--", "sh", "-c", "cat note-*").stdout == "0\n1\n2\n"
    kinds = [json.loads(line)["type"] for line in cli("events", "list", "garden", "--json").stdout.splitlines()]
    assert [kind for kind in kinds if kind != "session_changed"] == ["hive_created", "workspace_created"]


@pytest.mark.parametrize("more", [("--allow", "example.org"), ("--ticket", "spring")])
def test_who_comes_later_is_not_left_without_what_it_asked_for(garden: Cli, more: tuple[str, ...]) -> None:
    with holder():
        ran = garden("exec", "-H", "garden", *more, "--", "true")
        assert (ran.returncode, "is in use" in ran.stderr) == (2, True)
    assert garden("exec", "-H", "garden", *more, "--", "true").returncode == 0


def test_checkpoints_diffs_and_forks_work_while_a_command_runs(garden: Cli) -> None:
    with holder() as first:
        assert garden("workspace", "checkpoint", "garden", "--name", "spring").returncode == 0
        garden("exec", "-H", "garden", "--", "sh", "-c", "echo eaten > bed")
        assert "~ bed" in garden("workspace", "diff", "garden", "spring").stdout
        assert garden("workspace", "fork", "garden", "spare").returncode == 0
        assert garden("exec", "-H", "spare", "--", "cat", "bed").stdout == "eaten\n"
        archived = garden("workspace", "archive", "garden")
        assert archived.returncode == 0, archived.stderr
        assert finish(first) == "down\n"
    assert garden("workspace", "rollback", "garden", "spring").returncode == 0
    assert garden("exec", "-H", "garden", "--", "cat", "bed").stdout == "sown\n"


def test_a_workspace_in_use_is_not_destroyed(garden: Cli) -> None:
    with holder() as first:
        ran = garden("workspace", "destroy", "garden", "--yes")
        assert (ran.returncode, f"process {first.pid}" in ran.stderr) == (2, True)
    assert garden("exec", "-H", "garden", "--", "cat", "bed").stdout == "sown\n"


@pytest.fixture
def context(garden: Cli, program: Cli) -> Iterator[Cli]:
    """Run cells in a kept context of the hive, which is ended afterwards."""
    yield lambda *words: program("python", "-H", "garden", "--context", "bees", *words)
    assert program("python", "-H", "garden", "--context", "bees", "--end").returncode == 0


def test_commands_join_the_keeper_of_a_context(context: Cli, program: Cli) -> None:
    assert context("-c", "x = open('/tmp/mine', 'w').write('1')").returncode == 0
    assert program("exec", "-H", "garden", "--", "cat", "/tmp/mine", "bed").stdout == "1sown\n"
    assert context("-c", "open('bed').read() + str(x)").stdout == "'sown\\n1'\n"


def test_a_keeper_waits_for_a_running_command_and_says_so(context: Cli, home: Path) -> None:
    words = ("python", "-H", "garden", "--context", "bees", "-c", "open('bed').read()")
    with holder() as first, spawned(*words) as cell:
        assert cell.stderr is not None
        assert f"process {first.pid}" in read_line(cell)
        finish(first)
        assert finish(cell) == "'sown\\n'\n"


def read_line(process: subprocess.Popen[str]) -> str:
    """Read what a process says on its standard error, without waiting for ever."""
    assert process.stderr is not None
    ready, _, _ = select.select([process.stderr], [], [], DEADLINE_S)
    assert ready, "it said nothing"
    return process.stderr.readline()


def test_a_holder_that_is_killed_frees_the_workspace(garden: Cli) -> None:
    with holder() as first:
        os.kill(first.pid, 9)
        first.wait(DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while (ran := garden("exec", "-H", "garden", "--", "cat", "bed")).returncode != 0:
            assert time.monotonic() < deadline, ran.stderr
        assert ran.stdout == "sown\n"
