"""Templates can be listed, shown, checked and begun from the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(home: Path) -> Path:
    folder = home / ".local/share/skep/templates"
    folder.mkdir(parents=True)
    return folder


def test_list_names_the_shipped_templates_and_ones_own(cli: Cli, folder: Path) -> None:
    (folder / "garden.yaml").write_text("version: 1\nname: garden\nextends: default\ndescription: Mine.\n")
    (folder / "bad.yaml").write_text("version: 1\n")
    rows = [line.split("\t") for line in cli("template", "list").stdout.splitlines()]
    assert [row[0] for row in rows] == ["bad", "data-science", "default", "garden", "minimal", "web-dev"]
    assert rows[0][2:] == ["own", "cannot be used; see: skep template check bad"]
    assert rows[3] == ["garden", "default", "own", "Mine."]
    listed = json.loads(cli("template", "list", "--json").stdout)
    assert {(one["name"], one["ok"]) for one in listed if one["origin"] == "own"} == {("garden", True), ("bad", False)}


def test_show_prints_a_template_as_it_takes_effect(cli: Cli) -> None:
    shown = cli("template", "show", "data-science").stdout
    assert shown.startswith("# data-science -> default -> minimal\nversion: 1\nname: data-science\n")
    assert yaml.safe_load(shown)["python"]["dependencies"][0] == "matplotlib"
    data = json.loads(cli("template", "show", "data-science", "--json").stdout)
    assert data["chain"] == ["data-science", "default", "minimal"]
    assert data["nodejs"] == {"version": None, "runtime": "node", "dependencies": ["docx", "axios", "dotenv"]}
    assert len(data["recipe_hash"]) == 64


def test_show_prints_the_file_as_it_is(cli: Cli, folder: Path) -> None:
    text = "# mine\nversion: 1\nname: garden\nextends: default\n"
    (folder / "garden.yaml").write_text(text)
    assert cli("template", "show", "garden", "--source").stdout == text
    assert json.loads(cli("template", "show", "garden", "--source", "--json").stdout)["source"] == text


def test_check_prints_every_problem_with_its_place_and_ends_with_2(cli: Cli, folder: Path) -> None:
    file = folder / "garden.yaml"
    file.write_text("version: 1\nname: garden\npython:\n  dependencies:\n    - numpy\n    - -r x\n    - a b\nx: 1\n")
    ran = cli("template", "check", "garden")
    assert ran.returncode == 2
    assert ran.stderr == ""
    assert [line.split(": ")[:2] for line in ran.stdout.splitlines()] == [
        [f"{file}:6:7", "python.dependencies[1]"],
        [f"{file}:7:7", "python.dependencies[2]"],
        [f"{file}:8:1", "x"],
    ]
    (told,) = json.loads(cli("template", "check", "garden", "--json").stdout)
    assert (told["file"], told["ok"], len(told["problems"])) == (str(file), False, 3)
    assert told["problems"][2] | {"hint": ""} == {
        "line": 8,
        "column": 1,
        "field": "x",
        "message": "is not a known field",
        "hint": "",
    }


def test_check_looks_at_all_of_ones_own_when_none_is_named(cli: Cli, folder: Path) -> None:
    assert cli("template", "check").stdout == f"{folder} holds no templates\n"
    for name in ("garden", "orchard"):
        (folder / f"{name}.yaml").write_text(f"version: 1\nname: {name}\n")
    ran = cli("template", "check")
    assert (ran.returncode, ran.stdout) == (0, f"{folder}/garden.yaml: ok\n{folder}/orchard.yaml: ok\n")
    (folder / "orchard.yaml").write_text("version: 1\nname: Orchard\n")
    assert cli("template", "check").returncode == 2
    assert cli("template", "check", "garden").returncode == 0


def test_check_takes_a_file_from_elsewhere(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "garden.yaml"
    file.write_text("version: 1\nname: garden\nextends: web-dev\n")
    assert cli("template", "check", str(file)).stdout == f"{file}: ok\n"
    assert cli("template", "check", str(tmp_path / "absent.yaml")).returncode == 2


def test_new_writes_a_template_that_passes_the_check(cli: Cli, home: Path) -> None:
    ran = cli("template", "new", "garden", "--extends", "default")
    assert (ran.returncode, ran.stdout) == (0, f"{home}/.local/share/skep/templates/garden.yaml\n")
    assert cli("template", "check", "garden").returncode == 0
    again = cli("template", "new", "garden")
    assert again.returncode == 2
    assert "is there already" in again.stderr


@pytest.mark.parametrize("words", [("show", "../garden"), ("new", "../garden"), ("new", "x", "--extends", "../y")])
def test_a_name_that_leads_elsewhere_is_refused(cli: Cli, words: tuple[str, ...]) -> None:
    ran = cli("template", *words)
    assert ran.returncode == 2
    assert "is not a valid name" in ran.stderr


def test_a_wrong_template_cannot_be_shown(cli: Cli, folder: Path) -> None:
    (folder / "garden.yaml").write_text("version: 1\nname: garden\nextends: garden\n")
    ran = cli("template", "show", "garden")
    assert ran.returncode == 2
    assert ran.stderr == (
        f"error: {folder}/garden.yaml:3:1: extends: goes round in a circle: garden -> garden; "
        "let one of them extend something else\n"
        "  try: correct it, then run: skep template check garden\n"
    )


def test_what_a_file_says_plays_no_tricks_on_the_terminal(cli: Cli, folder: Path) -> None:
    (folder / "garden.yaml").write_text('version: 1\nname: garden\ndescription: "\\e[31mred\\u202e"\n"\\e[2J": 1\n')
    for words in (("list",), ("check", "garden"), ("show", "garden"), ("show", "garden", "--source")):
        ran = cli("template", *words)
        assert "\x1b" not in ran.stdout + ran.stderr
        assert "\u202e" not in ran.stdout + ran.stderr
