"""A workspace goes into an archive and comes back from it, whole or not at all, here or on another machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.workspace.conftest import MakeWorkspaces
from tests.workspace.tree_hash import tree_hash

from skep.errors import ArchiveDamaged, Conflict, NotFound
from skep.sandbox.erase import erase
from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import open_store
from skep.workspace.archiving import Homecoming, save
from skep.workspace.grounds import Layering
from skep.workspace.manifest import Packages
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.templates import Templates
from skep.workspace.workspaces import Workspaces

KEY = bytes(range(32))
FILES = "mkdir -p a/b; echo one > a/b/one; ln -s one a/b/link; rm .venv/bin/tool; echo two > two; chmod 600 two"


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(open_store(str(tmp_path / "store")), KEY)


def homecoming(archive: Archive, workspaces: Workspaces, snapshots: Snapshots) -> Homecoming:
    return Homecoming(archive, workspaces, snapshots)


async def filled(workspaces: Workspaces, archive: Archive) -> str:
    """Make a workspace with files of its own, archive it, and return the hash of what it shows."""
    await workspaces.create("w")
    async with workspaces.hold("w") as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run(FILES)).ok
        await workspace.amend(packages=Packages(python=("tiny",)))
        shown = await tree_hash(sandbox)
        await save(workspace, archive)
    return shown


async def hash_of(workspaces: Workspaces, workspace_id: str) -> str:
    async with workspaces.enter(workspace_id) as sandbox:
        return await tree_hash(sandbox)


async def test_all_of_it_comes_back_after_it_was_destroyed(
    workspaces: Workspaces, snapshots: Snapshots, archive: Archive
) -> None:
    before = await filled(workspaces, archive)
    await workspaces.destroy("w")
    manifest, restored = await homecoming(archive, workspaces, snapshots).restore("w")
    assert await hash_of(workspaces, "w") == before
    assert (manifest.id, manifest.packages.python, restored.name) == ("w", ("tiny",), "w")
    assert not (workspaces.home / "restoring" / "w").exists()


async def test_it_comes_back_on_a_machine_that_lacks_the_snapshot(
    workspaces: Workspaces, archive: Archive, tmp_path: Path, layering: Layering
) -> None:
    record = workspaces.home / "snapshots/minimal/latest/snapshot.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"hash": "ab" * 32}))
    before = await filled(workspaces, archive)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    there = Snapshots(elsewhere, Templates(elsewhere / "templates"))
    others = Workspaces(elsewhere, there, layering=layering)
    try:
        await homecoming(archive, others, there).restore("w")
        assert await hash_of(others, "w") == before
        if layering == "overlay":
            assert there.latest("minimal").python_packages == {"tiny": "1.0"}
    finally:
        erase(str(elsewhere), elsewhere.stat().st_ino)


async def test_one_archived_in_layers_comes_back_where_there_are_none(
    make_workspaces: MakeWorkspaces, snapshots: Snapshots, archive: Archive, layering: Layering
) -> None:
    before = await filled(make_workspaces(), archive)
    other: Layering = "copy" if layering == "overlay" else "overlay"
    others = make_workspaces(layering=other)
    await homecoming(archive, others, snapshots).restore("w", workspace_id="again")
    assert await hash_of(others, "again") == before


async def test_nothing_is_restored_over_what_is_there(
    workspaces: Workspaces, snapshots: Snapshots, archive: Archive
) -> None:
    before = await filled(workspaces, archive)
    with pytest.raises(Conflict, match="already"):
        await homecoming(archive, workspaces, snapshots).restore("w")
    assert await hash_of(workspaces, "w") == before


async def test_a_workspace_in_which_nothing_was_written_comes_back_too(
    workspaces: Workspaces, snapshots: Snapshots, archive: Archive
) -> None:
    await workspaces.create("w")
    before = await hash_of(workspaces, "w")
    async with workspaces.hold("w") as workspace:
        await save(workspace, archive)
        await save(workspace, archive)
    await homecoming(archive, workspaces, snapshots).restore("w", workspace_id="again")
    assert await hash_of(workspaces, "again") == before


async def test_what_runs_goes_on_while_it_is_archived(
    workspaces: Workspaces, snapshots: Snapshots, archive: Archive
) -> None:
    await workspaces.create("w")
    async with workspaces.hold("w") as workspace:
        sandbox = await workspace.sandbox()
        job = await sandbox.background("echo 1 > one; while :; do sleep 0.05; done")
        while not (await sandbox.run("test -s one")).ok:
            pass
        await save(workspace, archive)
        assert job.running
    await homecoming(archive, workspaces, snapshots).restore("w", workspace_id="again")
    async with workspaces.enter("again") as sandbox:
        assert (await sandbox.run("cat one")).text == "1\n"


async def test_a_damaged_archive_leaves_nothing_behind(
    workspaces: Workspaces, snapshots: Snapshots, archive: Archive, tmp_path: Path
) -> None:
    await filled(workspaces, archive)
    trees = workspaces.trees.all()
    for chunk in (tmp_path / "store" / "chunks").rglob("*"):
        if chunk.is_file():
            data = bytearray(chunk.read_bytes())
            data[-1] ^= 1
            chunk.chmod(0o600)
            chunk.write_bytes(data)
    with pytest.raises(ArchiveDamaged):
        await homecoming(archive, workspaces, snapshots).restore("w", workspace_id="again")
    assert workspaces.register.condition("again") == "missing"
    assert workspaces.trees.all() == trees
    assert not (workspaces.home / "restoring" / "again").exists()


async def test_what_was_never_archived_is_not_found(
    workspaces: Workspaces, snapshots: Snapshots, archive: Archive
) -> None:
    with pytest.raises(NotFound):
        await homecoming(archive, workspaces, snapshots).restore("w")
    assert workspaces.register.condition("w") == "missing"


async def test_an_archive_that_fails_keeps_a_workspace_from_being_destroyed(
    workspaces: Workspaces, tmp_path: Path
) -> None:
    await workspaces.create("w")
    (tmp_path / "store").write_text("not a folder")
    broken = Archive(open_store(str(tmp_path / "store")), KEY)
    with pytest.raises(Exception, match="store"):
        await workspaces.destroy("w", archive=lambda workspace: save(workspace, broken))
    assert workspaces.register.condition("w") == "ready"


_KILLED = """
import asyncio, os, sys
from pathlib import Path
from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import open_store
from skep.workspace.archiving import Homecoming
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.templates import Templates
from skep.workspace.workspaces import Workspaces

home, store, layering, phase = sys.argv[1:]
snapshots = Snapshots(Path(home), Templates(Path(home) / "templates"))
die = lambda reached: os.kill(os.getpid(), 9) if reached == phase else None
workspaces = Workspaces(Path(home), snapshots, layering=layering, on_phase=die)
archive = Archive(open_store(store), bytes(range(32)))
asyncio.run(Homecoming(archive, workspaces, snapshots).restore("w", workspace_id="again"))
"""


@pytest.mark.parametrize("phase", ["named", "moved", "manifest", "tree", "mark"])
async def test_killed_while_it_comes_back_it_is_whole_or_not_there_and_comes_back_the_next_time(
    workspaces: Workspaces, snapshots: Snapshots, archive: Archive, tmp_path: Path, layering: Layering, phase: str
) -> None:
    before = await filled(workspaces, archive)
    words = [sys.executable, "-c", _KILLED, str(workspaces.home), str(tmp_path / "store"), layering, phase]
    ended = subprocess.run(words, env=os.environ.copy(), check=False, capture_output=True, timeout=60)
    assert ended.returncode == -9, ended.stderr
    condition = workspaces.register.condition("again")
    assert condition == ("ready" if phase == "mark" else "half-made")
    if condition != "ready":
        await homecoming(archive, workspaces, snapshots).restore("w", workspace_id="again")
    assert await hash_of(workspaces, "again") == before
    workspaces.sweep()
    assert await hash_of(workspaces, "again") == before
    needed = {tree for manifest in workspaces.list() for tree in manifest.trees()}
    assert workspaces.trees.all() == needed
