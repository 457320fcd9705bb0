"""skep exec and skep shell behave as a local command does: input, output, signals, terminal and exit code."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Ran = subprocess.CompletedProcess[str]
Cli = Callable[..., Ran]

DEADLINE_S = 30.0


def spawn(*words: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "skep", *words], **options)  # type: ignore[call-overload, no-any-return]


def read_until(fd: int, mark: bytes) -> bytes:
    """Read from a terminal until it shows a text."""
    seen, deadline = b"", time.monotonic() + DEADLINE_S
    while mark not in seen:
        assert time.monotonic() < deadline, f"{mark!r} was not shown: {seen!r}"
        if select.select([fd], [], [], 0.1)[0]:
            seen += os.read(fd, 4096)
    return seen


def test_output_and_exit_code_are_the_commands_own(cli: Cli) -> None:
    ran = cli("exec", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "out\n", "err\n")


def test_a_killed_command_ends_with_the_status_a_shell_gives(cli: Cli) -> None:
    assert cli("exec", "--", "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL


def test_standard_input_reaches_the_command_to_its_end(home: Path) -> None:
    process = spawn("exec", "--", "sha256sum", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, _ = process.communicate(bytes(3_000_000), timeout=DEADLINE_S)
    assert out.split()[0].decode() == hashlib.sha256(bytes(3_000_000)).hexdigest()
    assert process.returncode == 0


def test_json_tells_how_a_command_ended(program: Cli) -> None:
    ended = json.loads(program("exec", "--json", "--", "sh", "-c", "echo hi; exit 3").stdout)
    assert (ended["exit_code"], ended["stdout"], ended["limit"]) == (3, "hi\n", None)


def test_a_time_limit_ends_it_and_is_named(cli: Cli) -> None:
    ran = cli("exec", "--timeout", "0.3", "--", "sleep", "60")
    assert ran.returncode == 128 + signal.SIGTERM
    assert "limit on time" in ran.stderr


def test_a_command_that_is_not_there_is_a_mistake_with_a_hint(cli: Cli) -> None:
    ran = cli("exec", "--", "no-such-program")
    assert ran.returncode == 2
    assert "no-such-program" in ran.stderr
    assert "try:" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_host_that_is_none_is_a_mistake(cli: Cli) -> None:
    ran = cli("exec", "--allow", "10.0.0.1", "--", "true")
    assert ran.returncode == 2
    assert "address" in ran.stderr


def test_a_hive_keeps_its_workspace_from_one_command_to_the_next(cli: Cli) -> None:
    cli("hive", "create", "garden")
    assert cli("exec", "--hive", "garden", "--", "sh", "-c", "echo kept > note").returncode == 0
    assert cli("exec", "--hive", "garden", "--", "cat", "note").stdout == "kept\n"
    assert cli("exec", "--", "ls").stdout == ""


def test_a_hive_without_a_sandbox_is_refused(cli: Cli) -> None:
    cli("hive", "create", "garden")
    cli("hive", "set", "garden", "sandbox_enabled=off")
    ran = cli("exec", "--hive", "garden", "--", "true")
    assert ran.returncode == 3
    assert "switched off" in ran.stderr


def test_what_isolates_nothing_says_so_on_every_use(cli: Cli, config: Path) -> None:
    config.write_text('{"sandbox": {"mechanism": "local", "isolation": "none", "allow_unsafe": true}}')
    for _ in range(2):
        ran = cli("exec", "--", "true")
        assert (ran.returncode, "isolates nothing" in ran.stderr) == (0, True)


def test_another_mechanism_than_the_one_that_was_wanted_is_told(cli: Cli, config: Path) -> None:
    sandbox = {"mechanism": "docker", "fallback": ["bubblewrap"], "docker": {"host": "unix:///nonexistent.sock"}}
    config.write_text(json.dumps({"sandbox": sandbox}))
    ran = cli("exec", "--", "echo", "here")
    assert (ran.returncode, ran.stdout) == (0, "here\n")
    assert "made by bubblewrap, as docker cannot be used: no engine answers" in ran.stderr


def test_a_hive_that_demands_more_isolation_than_there_is_runs_nothing(cli: Cli) -> None:
    cli("hive", "create", "garden")
    assert cli("hive", "set", "garden", "sandbox_isolation=machine").stdout == "garden: sandbox_isolation machine\n"
    ran = cli("exec", "--hive", "garden", "--", "true")
    assert (ran.returncode, "isolation is namespaces, and machine is demanded" in ran.stderr) == (5, True)
    cli("hive", "set", "garden", "sandbox_isolation=default")
    assert cli("exec", "--hive", "garden", "--", "true").returncode == 0
    (changed, back) = cli("events", "list", "garden", "--type", "hive_configured", "--json").stdout.splitlines()
    assert json.loads(changed)["body"]["changes"] == {"sandbox_isolation": "machine"}
    assert json.loads(back)["body"]["changes"] == {"sandbox_isolation": None}


def test_an_interrupt_is_passed_on_and_the_status_comes_back(home: Path) -> None:
    """Ctrl-C without a terminal is SIGINT to skep: the command gets it, and skep ends as the command does."""
    script = "trap 'echo caught; exit 9' INT; echo up; while :; do sleep 0.05; done"
    process = spawn("exec", "--", "bash", "-c", script, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert out == b"caught\n"
    assert process.returncode == 9


@pytest.fixture
def shell(home: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A shell on a terminal of 31 lines, and the other side of the terminal."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (31, 101))
    process = spawn("shell", stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    yield process, master
    process.kill()
    process.wait()
    os.close(master)


def test_a_shell_has_a_terminal_of_the_right_size(shell: tuple[subprocess.Popen[bytes], int]) -> None:
    """The size is passed on at the start and when it changes; keys reach programs; exit ends it with its status."""
    process, master = shell
    read_until(master, b"$ ")
    os.write(master, b"stty size\n")
    assert b"31 101" in read_until(master, b"$ ")
    os.write(master, b"python3 -c \"import time; print('as' + 'leep', flush=True); time.sleep(60)\"\n")
    read_until(master, b"asleep")
    os.write(master, b"\x03")
    read_until(master, b"$ ")
    termios.tcsetwinsize(master, (40, 90))
    process.send_signal(signal.SIGWINCH)
    os.write(master, b"until stty size | grep -x '40 90'; do sleep 0.05; done; id -un\n")
    assert b"\r40 90" in read_until(master, b"agent")
    os.write(master, b"exit 5\n")
    assert process.wait(DEADLINE_S) == 5


def test_a_shell_without_a_terminal_says_what_to_do(program: Cli) -> None:
    ran = program("shell")
    assert ran.returncode == 2
    assert "skep exec" in ran.stderr
