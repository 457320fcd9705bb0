"""The log can be read, followed, verified and exported from the command line."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a hive of six events; to be copied."""
    home = tmp_path_factory.mktemp("noted")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SKEP_", "XDG_"))}
    program = """
from skep.cli.run import run
assert run(["hive", "create", "garden"]) == 0
for value in ("on", "off", "on", "off", "on"):
    assert run(["hive", "set", "garden", f"skill_authoring_enabled={value}"]) == 0
"""
    subprocess.run([sys.executable, "-c", program], env={**kept, "HOME": str(home)}, check=True)
    return home


@pytest.fixture
def garden(cli: Cli, home: Path, noted: Path) -> str:
    """A hive with six events; its id."""
    subprocess.run(["cp", "-a", f"{noted}/.", home], check=True)
    return str(json.loads(cli("hive", "show", "garden", "--json").stdout)["id"])


def lines(ran: subprocess.CompletedProcess[str]) -> list[Any]:
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def tamper(home: Path, *changes: str) -> None:
    with closing(sqlite3.connect(home / ".local/share/skep/skep.db")) as database:
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            database.execute(f'DROP TRIGGER "{name}"')
        for change in changes:
            database.execute(change)
        database.commit()


def test_events_are_listed_in_order_one_json_object_a_line(cli: Cli, garden: str) -> None:
    events = lines(cli("events", "list", "garden", "--json"))
    assert [event["seq"] for event in events] == [1, 2, 3, 4, 5, 6]
    assert events[0]["type"] == "hive_created"
    assert events[0]["actor"].startswith("cli:")
    assert events[1]["body"] == {"changes": {"skill_authoring_enabled": True}}


def test_events_are_filtered_and_paged(cli: Cli, garden: str) -> None:
    assert len(lines(cli("events", "list", "garden", "--type", "hive_created", "--json"))) == 1
    assert [e["seq"] for e in lines(cli("events", "list", "garden", "--after", "2", "-n", "2", "--json"))] == [3, 4]
    assert lines(cli("events", "list", "garden", "--until", "2020-01-01", "--json")) == []
    assert len(lines(cli("events", "list", "garden", "--since", "2020-01-01", "--json"))) == 6
    assert lines(cli("events", "list", "garden", "--task", "t1", "--json")) == []


@pytest.mark.parametrize(
    "words",
    [("--type", "no_such_type"), ("--since", "yesterday"), ("--limit", "0"), ("--after", "-1"), ("--task", "../x")],
)
def test_a_filter_that_makes_no_sense_is_refused(cli: Cli, garden: str, words: tuple[str, str]) -> None:
    assert cli("events", "list", "garden", *words).returncode == 2


def test_a_pipe_gets_whole_lines_separated_by_tabs(cli: Cli, garden: str) -> None:
    first = cli("events", "list", "garden").stdout.splitlines()[0].split("\t")
    assert (first[0], first[2], first[4]) == ("1", "hive_created", "garden")


def test_tail_begins_with_the_newest_and_ends_after_a_count(cli: Cli, garden: str) -> None:
    assert [e["seq"] for e in lines(cli("events", "tail", "garden", "--last", "2", "--count", "2", "--json"))] == [5, 6]
    assert [e["seq"] for e in lines(cli("events", "tail", "garden", "--after", "0", "--count", "1", "--json"))] == [1]


def test_tail_shows_what_another_process_appends(cli: Cli, garden: str) -> None:
    tail = subprocess.Popen(
        [sys.executable, "-m", "skep", "events", "tail", "garden", "--last", "1", "--count", "2", "--json"],
        env=os.environ.copy(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tail.stdout is not None
    assert json.loads(tail.stdout.readline())["seq"] == 6
    cli("hive", "set", "garden", "sandbox_enabled=off")
    assert json.loads(tail.stdout.readline())["seq"] == 7
    tail.communicate(timeout=30)
    assert tail.returncode == 0


def test_an_untouched_log_verifies(cli: Cli, garden: str) -> None:
    assert cli("events", "verify").stdout == "ok: 6 events of 1 hive, every record as it was written\n"
    verdict = json.loads(cli("events", "verify", "garden", "--json").stdout)
    assert (verdict["ok"], verdict["count"], verdict["first_bad"]) == (True, 6, None)


@pytest.mark.parametrize(
    ("change", "seq"),
    [
        ("UPDATE skep_events SET record = replace(record, 'true', 'fals') WHERE seq = 2", 2),
        ("DELETE FROM skep_events WHERE seq = 3", 3),
        ("UPDATE skep_events SET seq = CASE seq WHEN 4 THEN 500 ELSE seq END", 4),
        ("DELETE FROM skep_events WHERE seq > 4", 5),
    ],
)
def test_verify_names_the_first_bad_record_and_exits_6(
    cli: Cli, garden: str, home: Path, change: str, seq: int
) -> None:
    tamper(home, change)
    ran = cli("events", "verify")
    assert ran.returncode == 6
    assert f"record {seq} of {garden}: " in ran.stderr
    as_json = cli("events", "verify", "--json")
    assert as_json.returncode == 6
    assert json.loads(as_json.stdout)["first_bad"]["seq"] == seq


def test_an_export_verifies_without_the_database(cli: Cli, garden: str, home: Path) -> None:
    file = home / "garden.jsonl"
    assert cli("events", "export", "garden", "--output", str(file)).returncode == 0
    assert cli("events", "verify", "--file", str(file)).returncode == 0
    file.write_text(file.read_text().replace("true", "false"))
    assert cli("events", "verify", "--file", str(file)).returncode == 6


def test_an_export_goes_to_stdout_as_json_lines(cli: Cli, garden: str) -> None:
    exported = lines(cli("events", "export"))
    assert [line["record"]["seq"] for line in exported if "record" in line] == [1, 2, 3, 4, 5, 6]


def test_an_export_never_overwrites(cli: Cli, garden: str, home: Path) -> None:
    (home / "kept").write_text("mine")
    ran = cli("events", "export", "--output", str(home / "kept"))
    assert (ran.returncode, (home / "kept").read_text()) == (2, "mine")


def test_an_export_to_an_impossible_place_is_the_users_mistake(cli: Cli, garden: str, home: Path) -> None:
    assert cli("events", "export", "--output", str(home / "no/such/folder/x")).returncode == 2
    assert cli("events", "verify", "--file", str(home / "absent")).returncode == 2


def test_a_hive_that_does_not_exist_is_named(cli: Cli, garden: str) -> None:
    for words in (("list", "attic"), ("tail", "attic"), ("verify", "attic"), ("export", "attic")):
        ran = cli("events", *words)
        assert (ran.returncode, "no hive 'attic'" in ran.stderr) == (2, True)
