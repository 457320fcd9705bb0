"""Snapshots in a home of their own, with templates that tests write and packages from the market."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.workspace.market import Market

from skep.sandbox.limits import Limits
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.templates import Templates

NODE = Path("/usr/bin/node")


def indexes(market: Market) -> Indexes:
    return Indexes(market.python_index, market.node_registry, market.upstreams)


def opened(home: Path, market: Market | None = None, *, limits: Limits | None = None) -> Snapshots:
    found = indexes(market) if market else None
    return Snapshots(home, Templates(home / "templates"), indexes=found, limits=limits)


def template(home: Path, name: str, *, python: object = None, nodejs: object = None) -> str:
    """Write a template; JSON is YAML too."""
    parts = {"python": python, "nodejs": nodejs}
    said = {"version": 1, "name": name, **{key: part for key, part in parts.items() if part is not None}}
    file = home / "templates" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(said))
    return name


def need_node() -> None:
    if not NODE.exists():
        missing = "/usr/bin/node is not installed; install it to run this test"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its bytes, and every link with where it leads."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = os.fsencode(path.readlink())
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def shelf_names(home: Path, name: str) -> set[str]:
    """Return what lies in the folder of a template's versions, without locks and logs."""
    return {path.name for path in (home / "snapshots" / name).iterdir()} - {"building", "lock", "failed.log"}
