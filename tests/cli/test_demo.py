"""The demo tells its whole story and cleans up after itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]


def test_the_demo_appends_follows_verifies_and_catches_forgers(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(home))
    ran = cli("demo")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("\nSkep demo\n")
    assert "opened" not in ran.stdout, "the program's own log does not interrupt the story"
    assert "tool_refused: the skill ended with status 400: rich text is not accepted" in ran.stdout
    assert "healing, tier 2: tool_refused -> Reflect" in ran.stdout
    assert "the service has one post: The linden is in bloom. Forty bees" in ran.stdout
    assert "the reader saw 1 to 97: no gap, no repetition" in ran.stdout
    assert "caught  record 49: the record and its hash do not match" in ran.stdout
    assert "caught  record 95: missing" in ran.stdout
    assert list(home.iterdir()) == [], "a throwaway home is removed, and nothing else is touched"


def test_a_kept_demo_can_be_looked_around_in(program: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program("demo", "--keep", str(home / "kept")).returncode == 0
    monkeypatch.setenv("SKEP_HOME", str(home / "kept"))
    verdict = json.loads(program("events", "verify", "--json").stdout)
    assert (verdict["ok"], verdict["count"] > 97) == (True, True)


def test_a_folder_that_exists_is_not_used(cli: Cli, home: Path) -> None:
    assert cli("demo", "--keep", str(home)).returncode == 2
