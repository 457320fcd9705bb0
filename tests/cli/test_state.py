"""The database can be looked at, migrated, backed up and restored, and a wrong one is left alone."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]


def test_status_creates_nothing(cli: Cli, home: Path) -> None:
    status = json.loads(cli("state", "status", "--json").stdout)
    assert (status["revision"], status["current"], status["dialect"]) == (None, False, "sqlite")
    assert not (home / ".local/share/skep/skep.db").exists()


def test_migrate_creates_the_database_and_says_what_it_did(cli: Cli) -> None:
    first = json.loads(cli("state", "migrate", "--json").stdout)
    assert first["from"] is None
    assert "already" in cli("state", "migrate").stdout
    assert json.loads(cli("state", "status", "--json").stdout)["current"] is True


def test_a_backup_restores_elsewhere_with_every_event(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("hive", "create", "garden")
    before = cli("events", "list", "garden", "--json").stdout
    saved = cli("state", "backup", str(home / "saved.zip"))
    assert saved.returncode == 0, saved.stderr
    monkeypatch.setenv("SKEP_HOME", str(home / "elsewhere"))
    restored = cli("state", "restore", str(home / "saved.zip"))
    assert restored.returncode == 0, restored.stderr
    assert cli("events", "list", "garden", "--json").stdout == before


def test_a_backup_never_overwrites(cli: Cli, home: Path) -> None:
    (home / "saved.zip").write_text("mine")
    assert cli("state", "backup", str(home / "saved.zip")).returncode == 2
    assert (home / "saved.zip").read_text() == "mine"


def test_a_backup_to_an_impossible_place_is_no_defect(cli: Cli, home: Path) -> None:
    assert cli("state", "backup", str(home / "no/such/folder/saved.zip")).returncode in (2, 5)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04broken"])
def test_a_file_that_is_no_backup_is_refused_and_nothing_is_made(cli: Cli, home: Path, content: bytes) -> None:
    (home / "saved.zip").write_bytes(content)
    ran = cli("state", "restore", str(home / "saved.zip"))
    assert ran.returncode in (2, 6)
    assert "Traceback" not in ran.stderr
    assert cli("hive", "list").returncode == 0


def test_a_backup_that_is_not_there_is_the_users_mistake(cli: Cli, home: Path) -> None:
    assert cli("state", "restore", str(home / "absent.zip")).returncode == 2


def test_restoring_an_older_backup_says_which_checkpoints_it_contradicts(cli: Cli, home: Path) -> None:
    cli("hive", "create", "garden")
    cli("state", "backup", str(home / "old.zip"))
    cli("hive", "set", "garden", "sandbox_enabled=off")
    for file in (home / ".local/share/skep").glob("skep.db*"):
        file.unlink()
    ran = cli("state", "restore", str(home / "old.zip"))
    assert ran.returncode == 6
    assert "everything was restored" in ran.stderr
    assert "mv " in ran.stderr


def test_the_database_of_another_program_is_refused_untouched(cli: Cli, home: Path) -> None:
    file = home / ".local/share/skep/skep.db"
    file.parent.mkdir(parents=True)
    with closing(sqlite3.connect(file)) as other:
        other.execute("CREATE TABLE recipes (name)")
        other.commit()
    before = file.read_bytes()
    for words in (("hive", "list"), ("state", "migrate"), ("state", "status")):
        ran = cli(*words)
        assert (ran.returncode, "another program" in ran.stderr) == (6, True)
    assert file.read_bytes() == before


def test_a_database_in_a_place_that_cannot_be_is_no_defect(cli: Cli, config: Path) -> None:
    config.write_text('{"state_url": "sqlite:////dev/null/skep.db"}')
    ran = cli("hive", "list")
    assert ran.returncode == 5, ran.stderr


@pytest.mark.service
def test_one_setting_moves_everything_to_postgresql(cli: Cli, config: Path, home: Path, postgres_url: str) -> None:
    cli("hive", "create", "garden")
    cli("state", "backup", str(home / "saved.zip"))
    config.write_text(json.dumps({"state_url": postgres_url}))
    restored = cli("state", "restore", str(home / "saved.zip"))
    assert restored.returncode == 0, restored.stderr
    cli("hive", "set", "garden", "sandbox_enabled=off")
    assert json.loads(cli("events", "verify", "--json").stdout)["count"] == 2
    assert json.loads(cli("state", "status", "--json").stdout)["dialect"] == "postgresql"
    assert cli("doctor").returncode in (0, 5)
    assert "ok\tdatabase\tpostgresql, schema" in cli("doctor").stdout
