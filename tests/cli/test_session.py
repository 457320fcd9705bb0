"""skep session shows the computers of threads, finds them again, and puts them away."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Ran = subprocess.CompletedProcess[str]
Cli = Callable[..., Ran]

DEADLINE_S = 60.0


def sessions(cli: Cli, *words: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(cli("session", "list", "--json", *words).stdout)
    return found


def session(cli: Cli) -> dict[str, object]:
    (only,) = sessions(cli)
    return only


def bed(cli: Cli, *words: str) -> str:
    return cli("exec", "-H", "garden", *words, "--", "cat", "bed").stdout


def spawn(*words: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "skep", *words],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@contextmanager
def holder(script: str = "echo up; cat > /dev/null") -> Iterator[subprocess.Popen[str]]:
    """Run a command in the garden that is up until its input ends."""
    process = spawn("exec", "-H", "garden", "--", "sh", "-c", script)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(DEADLINE_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
    assert ready, "it said nothing"
    return process.stdout.readline()


def test_no_session_yet_is_said_with_what_to_do(cli: Cli) -> None:
    ran = cli("session", "list")
    assert (ran.returncode, "skep exec --hive" in ran.stderr) == (0, True)


def test_a_command_is_its_own_controller_and_leaves_its_session_stopped(garden: Cli) -> None:
    found = session(garden)
    assert (found["status"], found["controller"], found["hive"]) == ("stopped", None, "garden")
    shown = garden("session", "show", "garden").stdout
    assert "its controller ends" in shown and str(found["id"]) in shown
    by_id = json.loads(garden("session", "show", str(found["id"]), "--json").stdout)
    assert [step["after"] for step in by_id["changes"]] == ["creating", "active", "stopped"]


def test_a_running_one_is_active_and_names_who_runs_it(garden: Cli, program: Cli) -> None:
    with holder() as first:
        found = session(program)
        assert found["status"] == "active"
        assert f".{first.pid}." in str(found["controller"])


def test_resolve_says_what_had_to_be_done(garden: Cli) -> None:
    ran = garden("session", "resolve", "garden")
    assert ran.returncode == 0, ran.stderr
    assert "stopped -> resuming: its sandbox does not run" in ran.stdout
    assert "is active, and answers" in ran.stdout
    assert session(garden)["status"] == "stopped"


def test_a_missing_workspace_is_an_error_until_a_person_says_otherwise(garden: Cli, home: Path) -> None:
    found = str(session(garden)["id"])
    (home / ".local/share/skep/workspaces" / found).rename(home / "aside")
    for tree in (home / ".local/share/skep/trees").iterdir():
        tree.rename(home / f"aside-{tree.name}")
    for words in (("exec", "-H", "garden", "--", "true"), ("session", "resolve", "garden")):
        ran = garden(*words)
        assert (ran.returncode, "--recreate" in ran.stderr) == (6, True)
    assert session(garden)["status"] == "error"
    again = garden("session", "resolve", found, "--recreate")
    assert (again.returncode, "may be made anew" in again.stdout) == (0, True), again.stderr
    assert garden("exec", "-H", "garden", "--", "ls", "bed").returncode != 0


def test_stop_ends_the_sandbox_of_another_process(garden: Cli, program: Cli) -> None:
    with holder() as first:
        ran = program("session", "stop", "garden")
        assert (ran.returncode, "is stopped" in ran.stdout) == (0, True), ran.stderr
        assert first.wait(DEADLINE_S) != 0
    assert session(garden)["status"] == "stopped"
    assert bed(garden) == "sown\n"


def test_an_archived_one_comes_back_by_itself_and_by_hand(garden: Cli, home: Path) -> None:
    workspaces = home / ".local/share/skep/workspaces"
    for back in (("exec", "-H", "garden", "--", "true"), ("session", "restore", "garden")):
        assert garden("session", "archive", "garden").returncode == 0
        assert session(garden)["status"] == "archived"
        assert not (workspaces / str(session(garden)["id"])).exists()
        assert garden(*back).returncode == 0
        assert (session(garden)["status"], bed(garden)) == ("stopped", "sown\n")
    twice = garden("session", "restore", "garden")
    assert (twice.returncode, "not archived" in twice.stderr) == (2, True)


def test_deleting_asks_first_and_then_nothing_is_left(garden: Cli, program: Cli) -> None:
    asked = program("session", "delete", "garden")
    assert (asked.returncode, "--yes" in asked.stderr) == (2, True)
    garden("session", "archive", "garden")
    assert garden("session", "delete", "garden", "--yes").returncode == 0
    assert json.loads(garden("workspace", "archive", "--list", "--json").stdout) == []
    assert session(garden)["status"] == "destroyed"
    assert garden("exec", "-H", "garden", "--", "ls", "bed").returncode != 0  # and it begins anew


def test_a_workspace_that_was_destroyed_and_restored_is_not_swept_with_what_was_deleted(garden: Cli) -> None:
    for more in (("--no-archive",), ()):
        garden("workspace", "archive", "garden")
        assert garden("workspace", "destroy", "garden", "--yes", *more).returncode == 0
        assert garden("workspace", "restore", "garden").returncode == 0
        assert bed(garden) == "sown\n"


def test_what_was_deleted_can_be_made_anew_from_another_template(garden: Cli) -> None:
    garden("session", "delete", "garden", "--yes")
    assert garden("workspace", "create", "garden").returncode == 0
    before = json.loads(garden("workspace", "show", "garden", "--json").stdout)["birth"]
    assert garden("exec", "-H", "garden", "--", "true").returncode == 0
    assert json.loads(garden("workspace", "show", "garden", "--json").stdout)["birth"] == before


def test_threads_have_a_workspace_each_when_the_hive_says_so(garden: Cli) -> None:
    garden("hive", "set", "garden", "threads=thread")
    write = ("--", "sh", "-c", "echo $0 > bed")
    for thread in ("cli:one", "slack:C1:1700.1"):
        assert garden("exec", "-H", "garden", "--thread", thread, *write, thread).returncode == 0
    assert bed(garden, "--thread", "cli:one") == "cli:one\n"
    assert (
        garden("files", "get", "bed", "-", "-H", "garden", "--thread", "slack:C1:1700.1").stdout == "slack:C1:1700.1\n"
    )
    shown = json.loads(garden("session", "show", "garden", "--thread", "cli:one", "--json").stdout)
    assert shown["key"] == "cli:one"
    by_id = garden("exec", "-H", shown["id"], "--", "cat", "bed")
    assert by_id.stdout == "cli:one\n"
    owners = {row["id"]: row["hive"] for row in json.loads(garden("workspace", "list", "--json").stdout)}
    assert owners[shown["id"]] == "garden cli:one"


@pytest.mark.parametrize("thread", ["../../etc", "cli:", "cli:a\x00b", "x" * 10_000, "cli:\u202ea", "; rm -rf /", ""])
@pytest.mark.parametrize("words", [("exec", "-H", "garden"), ("session", "show", "garden")])
def test_hostile_keys_are_refused_and_shown_safely(garden: Cli, words: tuple[str, ...], thread: str) -> None:
    garden("hive", "set", "garden", "threads=thread")
    ran = garden(*words, "--thread", thread, *(("--", "true") if words[0] == "exec" else ()))
    assert (ran.returncode, "cannot be the key" in ran.stderr) == (2, True)
    assert "\x00" not in ran.stderr and "\u202e" not in ran.stderr and len(ran.stderr) < 1000
    assert len(sessions(garden)) == 1


@pytest.mark.parametrize("reference", ["../..", "No Such", "\x1b[31m", "00000000-0000-5000-8000-000000000000"])
@pytest.mark.parametrize("act", ["show", "resolve", "stop", "archive", "restore"])
def test_a_session_that_is_not_there_is_explained(garden: Cli, act: str, reference: str) -> None:
    ran = garden("session", act, reference)
    assert ran.returncode == 2, ran.stderr
    assert "\x1b" not in ran.stderr and "Traceback" not in ran.stderr


def test_another_accounts_session_is_denied_and_that_is_on_record(garden: Cli, tmp_path: Path) -> None:
    garden("account", "create", "wasps")
    found = str(session(garden)["id"])
    file = tmp_path / "honey"
    file.write_text("x")
    tries = [
        *(("session", act, found) for act in ("show", "resolve", "stop", "archive", "restore", "collect")),
        ("session", "delete", found, "--yes"),
        ("session", "attach", found, str(file)),
        ("session", "preview", found, "8000"),
        ("artifacts", "list", found),
        ("artifacts", "get", found, "x"),
        ("exec", "-H", found),
    ]
    for words in tries:
        ran = garden(*words, "-a", "wasps", *(("--", "true") if words[0] == "exec" else ()))
        assert ran.returncode == 3, (words, ran.stderr)
    listed = garden("events", "list", "garden", "--type", "access_denied", "--json").stdout.splitlines()
    assert len(listed) == len(tries)
    assert {json.loads(line)["body"]["asked_by"] for line in listed} == {"wasps"}
    assert sessions(garden, "--account", "wasps") == []
    assert session(garden)["status"] == "stopped"


def test_a_hive_whose_sandbox_is_switched_off_gets_none_by_another_way(garden: Cli, tmp_path: Path) -> None:
    garden("hive", "set", "garden", "sandbox_enabled=off")
    tries = (("resolve", "garden"), ("collect", "garden"), ("attach", "garden", __file__), ("preview", "garden", "80"))
    for words in tries:
        ran = garden("session", *words)
        assert (ran.returncode, "switched off" in ran.stderr) == (3, True)
    garden("hive", "set", "garden", "sandbox_enabled=on")
    assert garden("session", "resolve", "garden").returncode == 0


def test_lists_are_narrowed(garden: Cli) -> None:
    garden("hive", "create", "orchard")
    garden("exec", "-H", "orchard", "--", "true")
    assert {row["hive"] for row in sessions(garden)} == {"garden", "orchard"}
    assert {row["hive"] for row in sessions(garden, "--hive", "orchard")} == {"orchard"}
    assert sessions(garden, "--status", "active") == []
    wrong = garden("session", "list", "--status", "asleep")
    assert (wrong.returncode, "is no status" in wrong.stderr) == (2, True)


def test_sweep_stops_what_a_process_that_died_left_behind(garden: Cli, program: Cli) -> None:
    with holder() as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait(DEADLINE_S)
        assert session(garden)["status"] == "active"
        swept = json.loads(program("session", "sweep", "--json").stdout)
    assert list(swept["done"]) == [session(garden)["id"]]
    assert (session(garden)["status"], swept["failed"]) == ("stopped", {})
    assert bed(garden) == "sown\n"


def test_watching_prints_a_line_for_every_change(garden: Cli, program: Cli) -> None:
    watching = spawn("session", "list", "--watch", "--json")
    try:
        assert json.loads(read_line(watching))["status"] == "stopped"
        program("session", "archive", "garden")
        deadline = time.monotonic() + DEADLINE_S
        while json.loads(read_line(watching))["status"] != "archived":
            assert time.monotonic() < deadline
        watching.send_signal(signal.SIGINT)
        assert watching.wait(DEADLINE_S) == 130
    finally:
        end(watching)


def test_watching_on_a_terminal_redraws_a_table(garden: Cli) -> None:
    outside, inside = pty.openpty()
    watching = spawn("session", "list", "--watch", stdout=inside)
    os.close(inside)
    try:
        seen, deadline = b"", time.monotonic() + DEADLINE_S
        while seen.count(b"stopped") < 2:
            assert time.monotonic() < deadline, seen
            if select.select([outside], [], [], 1)[0]:
                seen += os.read(outside, 65536)
        assert b"STATUS" in seen
    finally:
        end(watching)
        os.close(outside)


def test_files_go_in_and_come_out(garden: Cli, tmp_path: Path) -> None:
    sent = tmp_path / "prices.csv"
    sent.write_text("item,price\nhoney,7\n")
    arrived = garden("session", "attach", "garden", str(sent))
    assert (arrived.returncode, "attachments/prices.csv" in arrived.stdout) == (0, True), arrived.stderr
    garden("exec", "-H", "garden", "--", "cp", "attachments/prices.csv", "output/display/out.csv")
    (made,) = json.loads(garden("session", "collect", "garden", "--json").stdout)["files"]
    assert json.loads(garden("session", "collect", "garden", "--json").stdout)["files"] == []
    (listed,) = json.loads(garden("artifacts", "list", "garden", "--json").stdout)
    assert (listed["sha256"], listed["name"]) == (made["sha256"], "out.csv")
    assert garden("artifacts", "get", "garden", "out.csv", "-").stdout == sent.read_text()
    target = tmp_path / "got"
    assert garden("artifacts", "get", "garden", made["sha256"][:10], str(target)).returncode == 0
    assert target.read_text() == sent.read_text()
    missing = garden("session", "attach", "garden", str(tmp_path / "nothing"))
    assert (missing.returncode, "is no file" in missing.stderr) == (2, True)


def test_artifacts_of_another_hive_are_not_had_by_their_hash(garden: Cli) -> None:
    garden("exec", "-H", "garden", "--", "sh", "-c", "echo secret > output/display/note")
    (made,) = json.loads(garden("session", "collect", "garden", "--json").stdout)["files"]
    garden("hive", "create", "orchard")
    ran = garden("artifacts", "get", "orchard", made["sha256"], "-")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert garden("artifacts", "get", "garden", made["sha256"], "-").stdout == "secret\n"  # the control


def test_a_preview_is_served_while_the_command_runs(garden: Cli) -> None:
    with holder("echo hello > index.html; python3 -m http.server 8000 >/dev/null 2>&1 & echo up; cat > /dev/null"):
        serving = spawn("session", "preview", "garden", "8000", "--ttl", "60")
        try:
            link = read_line(serving).strip()
            assert _opened(link) == "hello\n"
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(f"{link}x", timeout=20)
        finally:
            end(serving)


def _opened(link: str) -> str:
    """Open a link as a browser would, until the server inside answers."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            with opener.open(link, timeout=20) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError as error:  # 502 until the server listens
            assert error.code == 502 and time.monotonic() < deadline
            time.sleep(0.05)
