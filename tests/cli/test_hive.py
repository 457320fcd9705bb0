"""A person can make hives and accounts, look at them, change them and delete them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]


def json_of(ran: subprocess.CompletedProcess[str]) -> Any:
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_first_hive_needs_no_account(cli: Cli) -> None:
    ran = cli("hive", "create", "garden")
    assert ran.returncode == 0
    assert ran.stdout.startswith("made hive garden (hv-")


def test_a_hive_can_be_shown_by_name_and_by_id(cli: Cli) -> None:
    made = json_of(cli("hive", "create", "garden", "--json"))
    assert json_of(cli("hive", "show", "garden", "--json"))["id"] == made["id"]
    assert json_of(cli("hive", "show", made["id"], "--json"))["name"] == "garden"


def test_hives_are_listed_for_people_and_for_programs(cli: Cli) -> None:
    cli("hive", "create", "garden")
    cli("hive", "create", "attic")
    assert [hive["name"] for hive in json_of(cli("hive", "list", "--json"))] == ["attic", "garden"]
    assert [line.split("\t")[0] for line in cli("hive", "list").stdout.splitlines()] == ["attic", "garden"]


def test_an_empty_list_says_how_to_begin_and_is_an_empty_array_for_programs(cli: Cli) -> None:
    assert "skep hive create" in cli("hive", "list").stderr
    assert json_of(cli("hive", "list", "--json")) == []


def test_flags_are_set_by_name(cli: Cli) -> None:
    cli("hive", "create", "garden")
    ran = cli("hive", "set", "garden", "skill_authoring_enabled=on", "sandbox_enabled=off")
    assert ran.stdout == "garden: skill_authoring_enabled on, sandbox_enabled off\n"
    flags = json_of(cli("hive", "show", "garden", "--json"))["flags"]
    assert (flags["skill_authoring_enabled"], flags["sandbox_enabled"]) == (True, False)


@pytest.mark.parametrize("change", ["sandbox_enabled", "sandbox_enabled=maybe", "no_such_flag=on", "=on", "\x1b=on"])
def test_a_change_that_makes_no_sense_is_refused(cli: Cli, change: str) -> None:
    cli("hive", "create", "garden")
    ran = cli("hive", "set", "garden", change)
    assert ran.returncode == 2
    assert "\x1b" not in ran.stderr


def test_a_flag_that_is_not_rolled_out_is_shown_as_held_back(cli: Cli) -> None:
    cli("hive", "create", "garden")
    cli("rollout", "set", "sandbox_enabled", "0")
    assert "on (not rolled out to this account)" in cli("hive", "show", "garden").stdout
    shown = json_of(cli("hive", "show", "garden", "--json"))
    assert (shown["flags"]["sandbox_enabled"], shown["in_effect"]["sandbox_enabled"]) == (True, False)


def test_rollouts_are_listed_and_kept_within_bounds(cli: Cli) -> None:
    assert json_of(cli("rollout", "set", "sandbox_enabled", "25", "--json")) == {
        "flag": "sandbox_enabled",
        "percent": 25,
    }
    assert json_of(cli("rollout", "list", "--json"))["sandbox_enabled"] == 25
    assert cli("rollout", "set", "sandbox_enabled", "101").returncode == 2
    assert cli("rollout", "set", "sandbox_enabled", "many").returncode == 2


def test_deleting_asks_and_without_a_terminal_wants_a_yes(cli: Cli) -> None:
    cli("hive", "create", "garden")
    refused = cli("hive", "delete", "garden")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert cli("hive", "delete", "garden", "--yes").returncode == 0
    assert cli("hive", "show", "garden").returncode == 2


def test_the_events_of_a_deleted_hive_can_still_be_read_by_its_id(cli: Cli) -> None:
    made = json_of(cli("hive", "create", "garden", "--json"))
    cli("hive", "delete", "garden", "--yes")
    assert "hive_deleted" in cli("events", "list", made["id"]).stdout
    assert json_of(cli("hive", "list", "--deleted", "--json"))[0]["deleted_at"] is not None


def test_accounts_keep_hives_apart(cli: Cli) -> None:
    cli("account", "create", "acme")
    cli("hive", "create", "garden", "--account", "acme")
    assert cli("hive", "show", "garden").returncode == 2
    assert cli("hive", "show", "garden", "-a", "acme").returncode == 0
    assert json_of(cli("account", "show", "acme", "--json"))["hives"] == ["garden"]
    assert json_of(cli("account", "list", "--json"))[0]["id"] == "acme"


def test_an_account_with_hives_is_not_deleted(cli: Cli) -> None:
    cli("account", "create", "acme")
    cli("hive", "create", "garden", "-a", "acme")
    assert "still has hives" in cli("account", "delete", "acme", "--yes").stderr
    cli("hive", "delete", "garden", "-a", "acme", "--yes")
    assert json_of(cli("account", "delete", "acme", "--yes", "--json")) == {"id": "acme", "deleted": True}


def test_an_unknown_account_is_named(cli: Cli) -> None:
    assert "no account 'acme'" in cli("hive", "create", "garden", "-a", "acme").stderr


@pytest.mark.parametrize("name", ["../etc", "a\x1b[31m", "x" * 10_000, "\u202egarden", "-", "", "Garden", "a b"])
def test_a_bad_name_is_refused_safely(cli: Cli, name: str) -> None:
    ran = cli("hive", "create", "--", name)
    assert ran.returncode == 2
    assert "\x1b" not in ran.stderr
    assert "\u202e" not in ran.stderr
    assert len(ran.stderr) < 400


def test_two_hives_of_one_name_are_refused(cli: Cli) -> None:
    cli("hive", "create", "garden")
    assert "already" in cli("hive", "create", "garden").stderr


def test_names_are_completed(cli: Cli, home: Path) -> None:
    from skep.cli.desk import complete_account, complete_hive
    from skep.cli.hive import complete_flag

    cli("hive", "create", "garden")
    assert complete_hive("ga") == ["garden"]
    assert complete_hive("x") == []
    assert complete_account("de") == ["default"]
    assert "sandbox_enabled=off" in complete_flag("sand")


def test_completion_is_silent_when_the_settings_are_wrong(config: Path, home: Path) -> None:
    from skep.cli.desk import complete_hive

    config.write_text("{")
    assert complete_hive("") == []
