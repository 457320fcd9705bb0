"""Nothing the program offers is undocumented, and the reference is what the program says now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from skep import errors
from skep.cli.app import app
from skep.config.settings import Section, Settings
from skep.state.events import EVENT_TYPES

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def test_the_reference_is_up_to_date() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "reference"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", ""), "run: .venv/bin/python scripts/reference"


def command_names(command: Any, name: str) -> list[str]:
    children = getattr(command, "commands", {})
    return [name, *(found for child in children for found in command_names(children[child], f"{name} {child}"))]


def section_fields(section: type[Section], prefix: str = "") -> list[str]:
    found = []
    for name, field in section.model_fields.items():
        inner = [one for one in (field.annotation, *get_args(field.annotation)) if _is_section(one)]
        many = "[]" if field.get_default() == () else ""
        shown = f"{prefix}{field.alias or name}"
        found += section_fields(inner[0], f"{shown}{many}.") if inner else [shown]
    return found


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def subclasses(error: type[errors.SkepError]) -> list[type[errors.SkepError]]:
    return [error, *(found for child in error.__subclasses__() for found in subclasses(child))]


@pytest.mark.parametrize("name", command_names(typer.main.get_command(app), "skep"))
def test_each_command_is_documented(name: str) -> None:
    assert f"# {name}\n" in (REFERENCE / "commands.md").read_text()


@pytest.mark.parametrize("field", section_fields(Settings))
def test_each_setting_is_documented_with_its_meaning(field: str) -> None:
    (line,) = [row for row in (REFERENCE / "settings.md").read_text().splitlines() if f"| `{field}` |" in row]
    assert line.split("|")[-2].strip()


# A module may tell a case of its own apart by a subclass that nobody else names; it stands for the error it is one of.
PUBLIC = [error.__name__ for error in subclasses(errors.SkepError) if error.__module__ == errors.__name__]


@pytest.mark.parametrize("error", PUBLIC)
def test_each_error_is_documented_in_the_reference_and_in_the_tree(error: str) -> None:
    assert f"`{error}`" in (REFERENCE / "errors.md").read_text()
    assert error in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", sorted(EVENT_TYPES))
def test_each_event_type_is_documented(kind: str) -> None:
    assert f"## {kind}\n" in (REFERENCE / "events.md").read_text()


@pytest.mark.parametrize(
    "variable",
    ["SKEP_CONFIG", "SKEP_HOME", "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "PGPASSWORD", "SKEP_S3_SECRET_ACCESS_KEY"],
)
def test_each_environment_variable_is_documented(variable: str) -> None:
    assert f"`{variable}`" in (REFERENCE / "settings.md").read_text()
