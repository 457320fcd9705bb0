"""skep workspace health names what is broken, repair puts it right, install adds packages for good."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.workspace.market import Market, running_market
from tests.workspace.workbench import need_node

Ran = subprocess.CompletedProcess[str]
Cli = Callable[..., Ran]


@pytest.fixture
def goods() -> Iterator[Market]:
    with running_market() as running:
        yield running


@pytest.fixture
def garden(cli: Cli, config: Path, goods: Market) -> Cli:
    """A hive with a workspace whose packages come from the market."""
    packages = {
        "python_index": goods.python_index,
        "node_registry": goods.node_registry,
        "upstreams": goods.upstreams,
    }
    config.write_text(json.dumps({"packages": packages}))
    cli("hive", "create", "garden")
    ran = cli("exec", "-H", "garden", "--", "sh", "-c", "echo sown > bed")
    assert ran.returncode == 0, ran.stderr
    return cli


def findings(cli: Cli) -> dict[str, str]:
    ran = cli("workspace", "health", "garden", "--json")
    report = json.loads(ran.stdout)
    assert ran.returncode == (0 if report["ok"] else 6)
    return {finding["code"]: finding["severity"] for finding in report["findings"]}


def last_event(cli: Cli) -> tuple[str, dict[str, object]]:
    """Return what last happened to the hive's workspace."""
    lines = map(json.loads, cli("events", "list", "garden", "--json").stdout.splitlines())
    event = [event for event in lines if event["type"] != "session_changed"][-1]
    return event["type"], event["body"]


def test_a_sound_workspace_is_well_and_needs_no_repair(garden: Cli) -> None:
    assert set(findings(garden).values()) == {"ok"}
    ran = garden("workspace", "repair", "garden")
    assert (ran.returncode, ran.stdout) == (0, "garden needs no repair\n")
    assert last_event(garden)[0] == "workspace_created"


def test_a_damaged_environment_is_named_and_rebuilt_and_the_agents_files_stay(garden: Cli) -> None:
    garden("exec", "-H", "garden", "--", "sh", "-c", "rm -rf .venv; mkdir .venv; echo gone > .venv/bin")
    before = hashlib.sha256(garden("files", "get", "bed", "-", "-H", "garden").stdout.encode()).hexdigest()
    assert "broken" in findings(garden).values()
    ran = garden("workspace", "repair", "garden")
    assert (ran.returncode, "garden is well again" in ran.stdout) == (0, True)
    assert garden("exec", "-H", "garden", "--", "python", "-c", "print(6 * 7)").stdout == "42\n"
    after = hashlib.sha256(garden("files", "get", "bed", "-", "-H", "garden").stdout.encode()).hexdigest()
    assert before == after
    kind, body = last_event(garden)
    assert (kind, body["left"]) == ("workspace_repaired", [])


def test_a_manifest_that_was_cut_is_written_again(garden: Cli, home: Path) -> None:
    (manifest,) = home.glob(".local/share/skep/workspaces/*/workspace.json")
    manifest.write_bytes(manifest.read_bytes()[:40])
    assert findings(garden)["manifest"] == "broken"
    assert garden("workspace", "repair", "garden").returncode == 0
    assert garden("exec", "-H", "garden", "--", "cat", "bed").stdout == "sown\n"


def test_all_workspaces_are_looked_at_and_one_broken_one_is_enough_to_say_so(garden: Cli) -> None:
    garden("workspace", "fork", "garden", "spare")
    assert garden("workspace", "health", "--all").returncode == 0
    garden("exec", "-H", "spare", "--", "rm", "-rf", ".venv/bin")
    ran = garden("workspace", "health", "--all", "--json")
    assert ran.returncode == 6
    assert [(one["id"] == "spare", one["ok"]) for one in json.loads(ran.stdout)] == [(False, True), (True, False)]


def test_which_one_has_to_be_said(garden: Cli) -> None:
    for words in ((), ("garden", "--all")):
        ran = garden("workspace", "health", *words)
        assert (ran.returncode, "say which" in ran.stderr) == (2, True)


def test_a_home_that_has_moved_is_whole_and_shows_the_hives_folders_again(
    garden: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".local/share/skep").rename(home / "moved")
    monkeypatch.setenv("SKEP_HOME", str(home / "moved"))
    assert set(findings(garden).values()) == {"ok"}
    assert "garden" in garden("exec", "-H", "garden", "--", "cat", "hive/.hive.toml").stdout


def test_packages_are_installed_for_good(garden: Cli) -> None:
    ran = garden("workspace", "install", "garden", "tinypkg")
    assert ran.returncode == 0, ran.stderr
    assert "garden has tinypkg now" in ran.stdout
    told = garden("exec", "-H", "garden", "--", "python", "-c", "import tinypkg; print(tinypkg.ANSWER)")
    assert told.stdout == "42\n"
    assert "tinypkg" in garden("files", "get", "pyproject.toml", "-", "-H", "garden").stdout
    assert json.loads(garden("workspace", "show", "garden", "--json").stdout)["below"]["packages"]["python"] != []
    assert last_event(garden) == ("packages_installed", {"python": ["tinypkg"], "node": []})
    assert set(findings(garden).values()) == {"ok"}


def test_node_packages_too(garden: Cli) -> None:
    need_node()
    ran = garden("workspace", "install", "garden", "--node", "tinypkg")
    assert ran.returncode == 0, ran.stderr
    told = garden("exec", "-H", "garden", "--", "node", "-e", "console.log(require('tinypkg'))")
    assert told.stdout == "42\n"


def test_a_package_that_cannot_be_had_changes_nothing(garden: Cli) -> None:
    before = garden("files", "get", "pyproject.toml", "-", "-H", "garden").stdout
    ran = garden("workspace", "install", "garden", "tinypkg", "no-such-package")
    assert (ran.returncode, "no-such-package" in ran.stderr) == (2, True)
    assert "Traceback" not in ran.stderr
    assert garden("files", "get", "pyproject.toml", "-", "-H", "garden").stdout == before
    assert garden("exec", "-H", "garden", "--", "python", "-c", "import tinypkg").returncode == 1
    assert last_event(garden)[0] == "workspace_created"


def test_what_is_installed_is_in_a_fork_and_comes_back_from_an_archive(garden: Cli) -> None:
    garden("workspace", "install", "garden", "tinypkg")
    garden("workspace", "fork", "garden", "spare")
    garden("workspace", "destroy", "garden", "--yes")
    assert garden("workspace", "restore", "garden").returncode == 0
    for workspace in ("garden", "spare"):
        told = garden("exec", "-H", workspace, "--", "python", "-c", "import tinypkg; print(tinypkg.ANSWER)")
        assert told.stdout == "42\n"
    assert set(findings(garden).values()) == {"ok"}
