"""The settings can be found, shown without secrets, checked, and watched while they change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]


def test_path_follows_the_environment(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("config", "path").stdout == f"{home}/.config/skep/config.json\n"
    monkeypatch.setenv("SKEP_CONFIG", "/elsewhere/my.json")
    assert json.loads(cli("config", "path", "--json").stdout)["config"] == "/elsewhere/my.json"


def test_show_gives_the_settings_in_effect(cli: Cli, config: Path) -> None:
    config.write_text('{"sandbox": {"limits": {"cpus": 3.5}}}')
    shown = json.loads(cli("config", "show", "--json").stdout)
    assert shown["sandbox"]["limits"]["cpus"] == 3.5
    assert shown["sandbox"]["limits"]["memory_mb"] == 4096
    assert "sandbox.limits.cpus                   3.5\n" in cli("config", "show").stdout


def test_show_never_prints_a_secret(cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "planted-in-the-environment")
    config.write_text('{"state_url": "postgresql://skep:planted-password@db.example.org/skep"}')
    for words in (("config", "show"), ("config", "show", "--json"), ("--debug", "config", "show")):
        ran = cli(*words)
        assert ran.returncode == 0
        assert "planted" not in ran.stdout + ran.stderr
        assert "postgresql://skep:[secret]@db.example.org/skep" in ran.stdout


def test_check_says_ok_or_exactly_what_is_wrong(cli: Cli, config: Path) -> None:
    assert "the defaults apply" in cli("config", "check").stdout
    config.write_text("{}")
    assert cli("config", "check").stdout == f"{config}: ok\n"
    config.write_text('{\n  "budgets": {"usd_per_day": "lots"}\n}')
    ran = cli("config", "check")
    assert ran.returncode == 2
    assert ran.stderr == (
        f'error: {config}: budgets.usd_per_day (line 2, column 15): should be a number, got "lots"\n'
        "  try: correct it, then run: skep config check\n"
    )


def test_check_gives_programs_each_problem_with_its_place(cli: Cli, config: Path) -> None:
    config.write_text('{"budgets": {"usd_per_dya": 1}, "x": 2}')
    ran = cli("config", "check", "--json")
    assert ran.returncode == 2
    first, second = json.loads(ran.stdout)["problems"]
    assert (first["field"], first["position"]) == ("budgets.usd_per_dya", {"line": 1, "column": 14})
    assert (second["field"], first["hint"]) == ("x", "did you mean usd_per_day?")


def test_a_named_file_that_is_absent_is_a_mistake_for_programs_too(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKEP_CONFIG", str(home / "absent.json"))
    ran = cli("config", "check", "--json")
    assert (ran.returncode, json.loads(ran.stderr)["error"]["type"]) == (2, "ConfigInvalid")


def test_every_command_refuses_to_work_with_wrong_settings(cli: Cli, config: Path) -> None:
    config.write_text('{"chat_models": [{"id": "m", "provider": "openai", "api_key": "x"}]}')
    ran = cli("hive", "list")
    assert ran.returncode == 2
    assert "chat_models[0].api_key" in ran.stderr
    assert "export OPENAI_API_KEY=" in ran.stderr


def test_schema_is_json_for_editors(cli: Cli) -> None:
    assert json.loads(cli("config", "schema").stdout)["title"] == "Skep config.json"


@contextmanager
def watching(*words: str) -> Iterator[Callable[[], str]]:
    """Run a command that does not end by itself; yields what reads its next line."""
    running = subprocess.Popen(
        [sys.executable, "-m", "skep", *words],
        env=os.environ.copy(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    try:
        yield running.stdout.readline
    finally:
        running.terminate()
        running.communicate(timeout=30)


def test_a_running_process_notices_a_valid_and_an_invalid_change(config: Path) -> None:
    config.write_text("{}")
    with watching("config", "check", "--watch") as next_line:
        assert next_line().startswith("watching ")
        config.write_text('{"budgets": {"steps_per_task": 7}}')
        assert next_line() == "applied: budgets\n"
        config.write_text('{"budgets": {"steps_per_task": 7.5}}')
        assert next_line() == (
            f"refused, the old settings stay: {config}: budgets.steps_per_task (line 1, column 14): "
            "should be a whole number, got 7.5\n"
        )
        config.unlink()
        assert "is gone" in next_line()
        config.write_text('{"budgets": {"steps_per_task": 8}}')
        assert next_line() == "applied: budgets\n"


def test_a_tail_that_runs_logs_a_refused_change_with_the_field(program: Cli, config: Path) -> None:
    assert program("hive", "create", "garden").returncode == 0
    with watching("events", "tail", "garden") as next_line:
        assert "hive_created" in next_line()
        config.write_text('{"sandbox": {"limits": {"cpus": -1}}}')
        logged = json.loads(next_line())
        assert (logged["level"], logged["event"]) == ("error", "config_refused")
        assert "sandbox.limits.cpus (line 1, column 25)" in logged["problem"]
