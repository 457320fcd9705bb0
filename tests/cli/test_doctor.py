"""The doctor tells what works, and exits with 5 when something essential is missing."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from skep.sandbox.mechanisms import MECHANISMS

Cli = Callable[..., subprocess.CompletedProcess[str]]

NAMES = [
    "system",
    "user namespaces",
    "seccomp",
    "cgroups",
    "overlay",
    "landlock",
    "bwrap",
    "sandbox",
    "mechanism",
    "containers",
    "workspaces",
    "templates",
    "config",
    "database",
]


def checks(ran: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(ran.stdout)["checks"]}


def test_every_check_is_reported_in_json(cli: Cli) -> None:
    ran = cli("doctor", "--json")
    found = json.loads(ran.stdout)
    assert [check["name"] for check in found["checks"]] == [*NAMES, "models", "disk"]
    assert ran.returncode == (0 if found["usable"] else 5)
    for check in found["checks"]:
        assert check["status"] in {"ok", "degraded", "missing"}
        assert bool(check["fix"]) == (check["status"] != "ok"), check


def test_a_pipe_gets_one_line_per_check(cli: Cli) -> None:
    lines = [line.split("\t") for line in cli("doctor").stdout.splitlines()]
    assert [line[1] for line in lines if line[0] != "mechanism"] == [*NAMES, "models", "disk"]
    assert [line[1] for line in lines if line[0] == "mechanism"] == list(MECHANISMS)


def test_every_mechanism_is_shown_with_its_isolation_and_what_it_lacks(cli: Cli, config: Path) -> None:
    config.write_text('{"sandbox": {"docker": {"host": "unix:///nonexistent.sock"}}}')
    found = {one["name"]: one for one in json.loads(cli("doctor", "--json").stdout)["mechanisms"]}
    assert {name: one["isolation"] for name, one in found.items()} == {
        name: one.isolation for name, one in MECHANISMS.items()
    }
    assert not found["docker"]["usable"] and found["docker"]["fix"]
    assert found["bubblewrap"]["usable"] and found["bubblewrap"]["create_ms"] is None
    assert not found["local"]["usable"] and "allow_unsafe" in found["local"]["fix"]


def test_the_mechanisms_that_can_be_used_are_timed_on_the_spot(cli: Cli, config: Path) -> None:
    absent = {"docker": {"host": "unix:///nonexistent.sock"}, "gvisor": {"path": "/nonexistent"}}
    config.write_text(json.dumps({"sandbox": absent}))
    found = json.loads(cli("doctor", "--bench", "--json").stdout)["mechanisms"]
    timed = {one["name"] for one in found if one["create_ms"] and one["exec_ms"]}
    assert timed == {one["name"] for one in found if one["usable"]} == {"bubblewrap"}


def test_settings_that_nothing_here_can_meet_are_missing_something_essential(cli: Cli, config: Path) -> None:
    sandbox = {"mechanism": "gvisor", "isolation": "kernel", "gvisor": {"path": "/nonexistent"}}
    config.write_text(json.dumps({"sandbox": sandbox}))
    ran = cli("doctor", "--json")
    assert ran.returncode == 5
    assert checks(ran)["mechanism"]["status"] == "missing"
    assert "gvisor: there is no /nonexistent" in checks(ran)["mechanism"]["found"]


def test_the_doctor_changes_nothing(cli: Cli, home: Path) -> None:
    cli("doctor")
    assert list(home.rglob("*")) == []


def test_a_model_is_reported_by_the_name_of_its_key_alone(
    cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(
        json.dumps(
            {
                "chat_models": [
                    {"id": "a", "provider": "openai"},
                    {"id": "b", "provider": "anthropic"},
                    {"id": "c", "provider": "ollama", "base_url": "http://localhost:11434/v1"},
                ]
            }
        )
    )
    monkeypatch.setenv("OPENAI_API_KEY", "planted-secret")
    ran = cli("doctor", "--json")
    found = checks(ran)
    assert found["model a"]["status"] == "ok"
    assert (found["model b"]["status"], found["model b"]["fix"]) == ("degraded", "export ANTHROPIC_API_KEY=…")
    assert found["model c"]["status"] == "ok"
    assert "planted-secret" not in ran.stdout + ran.stderr


def test_a_wrong_config_is_a_finding_and_not_the_end(cli: Cli, config: Path) -> None:
    config.write_text('{"x": 1}')
    ran = cli("doctor", "--json")
    assert ran.returncode == 5
    assert (checks(ran)["config"]["status"], "x (line 1" in checks(ran)["config"]["found"]) == ("missing", True)


def test_an_existing_database_is_reported_with_schema_and_journal(cli: Cli) -> None:
    cli("hive", "create", "garden")
    found = checks(cli("doctor", "--json"))["database"]["found"]
    assert re.fullmatch(r"sqlite, schema \d{4}, journal wal", found)


def test_a_database_that_cannot_be_reached_is_missing(cli: Cli, config: Path) -> None:
    config.write_text('{"state_url": "postgresql://skep:planted-password@127.0.0.1:1/skep"}')
    ran = cli("doctor", "--json")
    assert ran.returncode == 5
    assert checks(ran)["database"]["status"] == "missing"
    assert "planted-password" not in ran.stdout + ran.stderr
