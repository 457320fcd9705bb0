"""Templates can be built, rolled back and cleaned up from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.workspace.market import Market, running_market
from tests.workspace.workbench import opened, template

from skep.workspace.workspaces import Workspaces

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shelf(home: Path) -> Path:
    return home / ".local/share/skep"


@pytest.fixture
def market(config: Path) -> Iterator[Market]:
    """Give an index, and settings that name it."""
    with running_market() as running:
        packages = {"python_index": running.python_index, "node_registry": running.node_registry}
        config.write_text(json.dumps({"packages": {**packages, "upstreams": running.upstreams}}))
        yield running


def test_build_tells_its_steps_and_says_what_was_made(cli: Cli, market: Market, shelf: Path) -> None:
    template(shelf, "garden", python={"dependencies": ["pear"]})
    ran = cli("template", "build", "garden")
    assert ran.returncode == 0, ran.stderr
    steps = ran.stderr.splitlines()
    assert steps[:3] == [
        "garden: choosing versions",
        "garden: fetching packages",
        "garden: installing 2 Python packages",
    ]
    assert ran.stdout.startswith("garden v0001-")
    assert "2 packages" in ran.stdout
    again = cli("template", "build", "garden")
    assert "up to date" in again.stdout


def test_a_failed_build_ends_with_the_code_for_a_wrong_request_and_names_the_package(
    cli: Cli, market: Market, shelf: Path
) -> None:
    template(shelf, "garden", python={"dependencies": ["brittle"]})
    ran = cli("template", "build", "garden")
    assert ran.returncode == 2
    assert "brittle==1.0 cannot be built" in ran.stderr
    assert "failed.log" in ran.stderr.replace("\n", "")
    market.closed = True
    assert cli("template", "build", "garden").returncode == 5


def test_json_lists_what_was_built(cli: Cli, market: Market, shelf: Path) -> None:
    template(shelf, "garden", python={"dependencies": ["apple<2"]})
    (built,) = json.loads(cli("template", "build", "garden", "--json").stdout)
    assert (built["new"], built["python_packages"]) == (True, {"apple": "1.0"})
    (built,) = json.loads(cli("template", "build", "garden", "--json").stdout)
    assert built["new"] is False


def test_versions_can_be_listed_and_gone_back_to(cli: Cli, home: Path) -> None:
    for _ in range(2):
        assert cli("template", "build", "minimal", "--fresh").returncode == 0
    rows = [line.split("\t") for line in cli("template", "versions", "minimal").stdout.splitlines()]
    assert [row[0][:5] for row in rows] == ["v0001", "v0002"]
    assert [row[-1] for row in rows] == ["", "latest"]
    first = rows[0][0]
    assert first in cli("template", "rollback", "minimal", first).stdout
    listed = json.loads(cli("template", "versions", "minimal", "--json").stdout)
    assert [one["latest"] for one in listed] == [True, False]


def test_what_is_not_there_is_told(cli: Cli, home: Path) -> None:
    assert "has not been built yet" in cli("template", "versions", "minimal").stderr
    ran = cli("template", "versions", "mineral")
    assert (ran.returncode, "no template mineral" in ran.stderr) == (2, True)
    assert cli("template", "rollback", "minimal", "v0001-000000000000").returncode == 2


def test_versions_says_when_the_template_has_changed_since(cli: Cli, shelf: Path) -> None:
    template(shelf, "garden", python={})
    cli("template", "build", "garden")
    assert "changed since" not in cli("template", "versions", "garden").stderr
    template(shelf, "garden", python={"dependencies": ["apple"]})
    assert "changed since" in cli("template", "versions", "garden").stderr


def test_gc_removes_what_nobody_needs(cli: Cli, home: Path) -> None:
    assert "nothing to remove" in cli("template", "gc").stdout
    for _ in range(2):
        cli("template", "build", "minimal", "--fresh")
    ran = cli("template", "gc")
    assert ran.stdout.startswith("removed minimal v0001-")
    assert len(json.loads(cli("template", "versions", "minimal", "--json").stdout)) == 1
    assert json.loads(cli("template", "gc", "--json").stdout) == []


def test_gc_keeps_the_version_that_a_workspace_was_made_from(cli: Cli, shelf: Path) -> None:
    asyncio.run(Workspaces(shelf, opened(shelf)).create("desk", template="minimal"))
    cli("template", "build", "minimal", "--fresh")
    assert "nothing to remove" in cli("template", "gc").stdout
    assert len(json.loads(cli("template", "versions", "minimal", "--json").stdout)) == 2


def test_on_a_terminal_the_steps_share_one_line(home: Path) -> None:
    """A person sees a line that changes; it is gone when the build is done."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "skep", "template", "build", "minimal"]
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, seen
    assert b"minimal:" in seen
    assert b"\x1b[2K" in seen
    assert out.startswith(b"minimal v0001-")
