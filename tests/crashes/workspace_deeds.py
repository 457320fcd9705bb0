"""Changes of workspaces that are cut short somewhere, and a look at what is there afterwards.

No sandbox runs in these: what a workspace holds is written and read on the host.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from skep.workspace.grounds import LAYOUT, Layering
from skep.workspace.held import MOST_LAYERS
from skep.workspace.layers.overlay import merged, opened
from skep.workspace.manifest import MARK, Manifest, State
from skep.workspace.snapshot.snapshot import Record, write
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.templates import Templates
from skep.workspace.workspaces import Workspaces

VERSION = "v0001-000000000001"


def make_snapshot(home: Path) -> None:
    folder = home / "snapshots" / "minimal" / VERSION
    (folder / "tree" / ".venv").mkdir(parents=True)
    (folder / "tree" / ".venv" / "tool").write_text("one\n")
    (folder / "tree" / "pyproject.toml").write_text("[project]\n")
    record = Record(
        template="minimal", version=VERSION, hash="0" * 64, recipe="", python=None, python_packages={}, node=None,
        node_packages={}, built_at=datetime(2026, 1, 1, tzinfo=UTC), size_bytes=20, files=3,
    )  # fmt: skip
    write(folder, record)
    (folder.parent / "latest").symlink_to(VERSION)


def open_workspaces(home: Path, layering: Layering, on_phase: Callable[[str], None] = lambda _: None) -> Workspaces:
    return Workspaces(home, Snapshots(home, Templates(home / "templates")), layering=layering, on_phase=on_phase)


def upper(workspaces: Workspaces, name: str) -> Path:
    return workspaces.trees.tree(workspaces.show(name).upper)


async def furnished(workspaces: Workspaces) -> None:
    """Make a workspace with a checkpoint and files of before and after it."""
    await workspaces.create("hv-one")
    tree = upper(workspaces, "hv-one")
    (tree / "kept").write_text("kept\n")
    (tree / "changes").write_text("early\n")
    await workspaces.checkpoint("hv-one", "early")
    tree = upper(workspaces, "hv-one")
    (tree / "changes").write_text("late\n")
    (tree / "added").write_text("added\n")
    (tree / "folder").mkdir()
    (tree / "folder" / "large").write_bytes(b"large" * 3000)


async def nothing(_: Workspaces) -> None:
    pass


async def plain(workspaces: Workspaces) -> None:
    folder = workspaces.home / "workspaces" / "hv-one"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("old\n")


async def many_layers(workspaces: Workspaces) -> None:
    manifest = await workspaces.create("hv-one")

    def layer(number: int) -> str:
        def fill(tree: Path, _: object) -> None:
            (tree / f"f{number}").write_text(f"{number}\n")
            (tree / "same").write_text(f"{number}\n")

        owner = workspaces.trees.owner(manifest.upper)
        return workspaces.trees.new(birth=manifest.birth, owner=owner, fill=fill)

    async with workspaces.hold("hv-one") as workspace:
        await workspace.amend(layers=tuple(layer(number) for number in range(MOST_LAYERS + 1)))


async def half_made(workspaces: Workspaces) -> None:
    await furnished(workspaces)
    await workspaces.create("hv-two")
    workspaces.trees.beside(workspaces.show("hv-two").upper, MARK).unlink()
    (workspaces.home / "workspaces" / "hv-two" / MARK).unlink()


async def create(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")


async def create_another(workspaces: Workspaces) -> None:
    await workspaces.create("hv-two")


async def checkpoint(workspaces: Workspaces) -> None:
    await workspaces.checkpoint("hv-one", "late")


async def rollback(workspaces: Workspaces) -> None:
    await workspaces.rollback("hv-one", "early")


async def forget(workspaces: Workspaces) -> None:
    await workspaces.forget("hv-one", "early")


async def fork(workspaces: Workspaces) -> None:
    await workspaces.fork("hv-one", ["child-a", "child-b"])


async def clone(workspaces: Workspaces) -> None:
    await workspaces.clone("hv-one", "child-a")


async def destroy(workspaces: Workspaces) -> None:
    await workspaces.destroy("hv-one")


async def suspend(workspaces: Workspaces) -> None:
    await workspaces.suspend("hv-one")


async def adopt(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")


async def compact(workspaces: Workspaces) -> None:
    async with workspaces.hold("hv-one") as workspace:
        await workspace.compact()


async def sweep(workspaces: Workspaces) -> None:
    workspaces.sweep()


Step = Callable[[Workspaces], Awaitable[None]]
#: What is done, after what has been made ready for it.
DEEDS: dict[str, tuple[Step, Step]] = {
    "create": (nothing, create),
    "create over a half-made one": (half_made, create_another),
    "checkpoint": (furnished, checkpoint),
    "rollback": (furnished, rollback),
    "forget": (furnished, forget),
    "fork": (furnished, fork),
    "clone": (furnished, clone),
    "destroy": (furnished, destroy),
    "suspend": (furnished, suspend),
    "adopt": (plain, adopt),
    "compact": (many_layers, compact),
    "sweep": (half_made, sweep),
}

Look = dict[str, tuple[str, ...]]


def look(home: Path, layering: Layering) -> Look:
    """Say what each workspace holds, and its checkpoints, by hashes that know nothing of ids and times."""
    workspaces = open_workspaces(home, layering)
    found = workspaces.census()
    assert not found.damaged, found.damaged
    seen: Look = {manifest.id: _held(workspaces, manifest) for manifest in found.manifests.values()}
    for name in found.plain:
        seen[name] = (_hash([str(home / "workspaces" / name)], without=LAYOUT),)
    return seen


def _held(workspaces: Workspaces, manifest: Manifest) -> tuple[str, ...]:
    now = manifest.below.model_copy(update={"layers": (manifest.upper, *manifest.layers)})
    kept = [checkpoint.state for checkpoint in manifest.checkpoints]
    suspended = "suspended" if manifest.suspended else "active"
    return (*(_hash(_layers(workspaces, state)) for state in (now, *kept)), suspended)


def _layers(workspaces: Workspaces, state: State) -> list[str]:
    layers = [str(workspaces.trees.tree(tree_id)) for tree_id in state.layers]
    if state.based and state.snapshot_version:
        layers.append(str(workspaces.home / "snapshots" / "minimal" / state.snapshot_version / "tree"))
    return layers


def _hash(layers: list[str], without: Sequence[str] = ()) -> str:
    digest = hashlib.sha256()
    for entry in merged(layers, over=()):
        if entry.path in without:
            continue
        digest.update(f"{entry.path}\0{entry.kind}\0{stat.S_IMODE(entry.stat.st_mode)}\0".encode())
        if entry.kind == "file":
            with os.fdopen(opened(entry), "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()


@dataclass(slots=True)
class Leftovers:
    """What is on the disk and should not be there once it has been swept."""

    trees: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.trees or self.names)


def leftovers(home: Path, layering: Layering) -> Leftovers:
    """Sweep, and return what is left that nobody needs."""
    workspaces = open_workspaces(home, layering)
    workspaces.sweep()
    found = workspaces.census()
    assert not found.half_made
    needed = {tree_id for manifest in found.manifests.values() for tree_id in manifest.trees()}
    hidden = [
        str(path.relative_to(home))
        for folder in (home / "trees", home / "workspaces")
        for path in folder.glob(".*")
        if path.name != ".lock"
    ]
    return Leftovers(workspaces.trees.all() - needed, hidden)
