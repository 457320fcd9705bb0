"""Whatever happens to a workspace on the host: a clear error, no half state, and nothing of the agent's lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.workspace.tree_hash import tree_hash

from skep.errors import NotFound, SkepError, Unavailable, WorkspaceDamaged
from skep.workspace.manifest import MARK, NAME, dump
from skep.workspace.workspaces import Workspaces


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def alter(path: Path) -> None:
    body = json.loads(path.read_bytes())
    path.write_text(json.dumps({**body, "suspended": True}))


def garble(path: Path) -> None:
    path.write_bytes(os.urandom(200))


def nest(path: Path) -> None:
    path.write_text("[" * 100_000)


def point_outside(path: Path) -> None:
    body = json.loads(path.read_bytes())
    path.write_text(json.dumps({**body, "upper": "../../../etc"}))


def remove(path: Path) -> None:
    path.unlink()


def become_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("harm", [cut, empty, alter, garble, nest, point_outside, remove, become_a_link])
async def test_a_manifest_that_was_harmed_is_named_and_can_be_recovered(
    workspaces: Workspaces, home: Path, harm: Callable[[Path], None]
) -> None:
    await workspaces.create("hv-one")
    await workspaces.create("hv-two")
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("echo mine > note")).ok
    await workspaces.checkpoint("hv-one", "here")
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("echo more > more")).ok
        known = await tree_hash(sandbox)
    harm(home / "workspaces" / "hv-one" / NAME)
    for attempt in (workspaces.act("hv-one", "checkpoint"), workspaces.destroy("hv-one")):
        with pytest.raises(WorkspaceDamaged) as caught:
            await attempt
        assert str(home / "workspaces" / "hv-one" / NAME) in caught.value.message
        assert "repair" in (caught.value.hint or "")
    assert [manifest.id for manifest in workspaces.list()] == ["hv-two"], "the others are there"
    assert list(workspaces.census().damaged) == ["hv-one"]
    with pytest.raises(WorkspaceDamaged):
        workspaces.in_use()
    assert workspaces.sweep() == [], "what cannot be read may need anything"
    assert list(workspaces.lost()) == ["hv-one"]
    workspaces.recover("hv-one")
    async with workspaces.enter("hv-one") as sandbox:
        assert await tree_hash(sandbox) == known
    assert [kept.name for kept in workspaces.show("hv-one").checkpoints] == ["here"]


async def test_a_manifest_of_a_newer_skep_is_left_alone(workspaces: Workspaces, home: Path) -> None:
    await workspaces.create("hv-one")
    path = home / "workspaces" / "hv-one" / NAME
    path.write_text(json.dumps({"v": 2, "id": "hv-one", "something": "new"}))
    with pytest.raises(WorkspaceDamaged, match="newer Skep") as caught:
        workspaces.show("hv-one")
    assert caught.value.hint == "upgrade Skep"


async def test_a_manifest_under_another_name_is_refused(workspaces: Workspaces, home: Path) -> None:
    await workspaces.create("hv-one")
    shutil.copytree(home / "workspaces" / "hv-one", home / "workspaces" / "hv-two")
    with pytest.raises(WorkspaceDamaged, match="holds the manifest of hv-one"):
        await workspaces.checkpoint("hv-two")


def unfinish(workspaces: Workspaces, workspace_id: str) -> None:
    """Leave a workspace as one whose maker died just before it was finished."""
    upper = workspaces.show(workspace_id).upper
    workspaces.trees.beside(upper, MARK).unlink()
    (workspaces.register.path(workspace_id) / MARK).unlink()


async def test_a_half_made_workspace_is_refused_and_made_again(workspaces: Workspaces, home: Path) -> None:
    first = await workspaces.create("hv-one")
    unfinish(workspaces, "hv-one")
    with pytest.raises(WorkspaceDamaged, match="never finished") as caught:
        async with workspaces.enter("hv-one"):
            pass
    assert "skep workspace create hv-one" in (caught.value.hint or "")
    assert workspaces.list() == []
    second = await workspaces.create("hv-one")
    assert second.upper != first.upper
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("tool")).text == "tool one\n"
    workspaces.sweep()
    assert [path.name for path in (home / "trees").iterdir()] == [second.upper]


async def test_a_half_made_workspace_that_nobody_makes_is_swept(workspaces: Workspaces, home: Path) -> None:
    await workspaces.create("hv-one")
    unfinish(workspaces, "hv-one")
    assert "hv-one" in workspaces.sweep()
    assert list((home / "trees").iterdir()) == []
    assert [path.name for path in (home / "workspaces").iterdir()] == [".lock"]


async def test_a_folder_deleted_under_a_running_sandbox_costs_nothing(workspaces: Workspaces, home: Path) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run("echo mine > note")).ok
        shutil.rmtree(home / "workspaces" / "hv-one")
        with pytest.raises(WorkspaceDamaged, match="removed or replaced") as caught:
            await workspace.checkpoint()
        assert "its files are safe" in (caught.value.hint or "")
        assert (await sandbox.run("echo goes on > more; cat note")).text == "mine\n"
        known = await tree_hash(sandbox)
    with pytest.raises(NotFound):
        workspaces.show("hv-one")
    assert workspaces.sweep() == []
    assert workspaces.recover("hv-one").id == "hv-one"
    async with workspaces.enter("hv-one") as sandbox:
        assert await tree_hash(sandbox) == known


async def test_a_folder_deleted_and_made_again_leaves_the_old_files_where_they_are(
    workspaces: Workspaces, home: Path
) -> None:
    await workspaces.create("hv-one")
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("echo mine > note")).ok
    shutil.rmtree(home / "workspaces" / "hv-one")
    await workspaces.create("hv-one")
    workspaces.sweep()
    assert [path.read_text() for path in (home / "trees").glob("*/tree/note")] == ["mine\n"]


async def test_a_tree_deleted_on_the_host_is_named(workspaces: Workspaces, home: Path) -> None:
    manifest = await workspaces.create("hv-one")
    shutil.rmtree(home / "trees" / manifest.upper)
    with pytest.raises(WorkspaceDamaged, match=manifest.upper):
        async with workspaces.enter("hv-one"):
            pass


async def test_a_tree_deleted_under_a_running_sandbox_is_an_error_and_not_an_empty_workspace(
    workspaces: Workspaces, home: Path
) -> None:
    manifest = await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        await workspace.sandbox()
        (home / "trees" / manifest.upper).rename(home / "aside")
        with pytest.raises(SkepError) as caught:
            await workspace.checkpoint()
        assert manifest.upper in caught.value.message
        assert workspace.manifest.upper == manifest.upper


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write to a folder. Root needs more than a mode for that."""
    if os.geteuid() == 0:
        pytest.skip("a mode does not hold root; see the test of read-only disks")
    folder.chmod(0o500)
    try:
        yield
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize("part", ["workspaces/hv-one", "trees"])
async def test_a_folder_made_read_only_under_a_running_sandbox_is_a_clear_error(
    workspaces: Workspaces, home: Path, part: str
) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run("echo mine > note")).ok
        before = workspace.manifest
        with read_only(home / part):
            with pytest.raises(Unavailable, match="cannot be written"):
                await workspace.checkpoint()
            assert workspace.manifest == before
            assert (await sandbox.run("cat note; echo two > two")).text == "mine\n"
        await workspace.checkpoint("now")
        assert (await sandbox.run("cat note two")).text == "mine\ntwo\n"


@pytest.mark.parametrize("layering", ["overlay"], indirect=True)
async def test_a_missing_snapshot_is_named(workspaces: Workspaces, home: Path) -> None:
    await workspaces.create("hv-one")
    shutil.rmtree(home / "snapshots" / "minimal")
    with pytest.raises(WorkspaceDamaged, match=r"snapshot minimal v0001.* is missing"):
        async with workspaces.enter("hv-one"):
            pass


@pytest.mark.parametrize("layering", ["copy"], indirect=True)
async def test_a_copied_workspace_needs_its_snapshot_no_more(workspaces: Workspaces, home: Path) -> None:
    await workspaces.create("hv-one")
    shutil.rmtree(home / "snapshots" / "minimal")
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("tool")).text == "tool one\n"


async def test_drafts_that_a_crash_left_are_no_trees(workspaces: Workspaces, home: Path) -> None:
    manifest = await workspaces.create("hv-one")
    (home / "trees" / ".new-0123456789abcdef" / "tree").mkdir(parents=True)
    (home / "workspaces" / "hv-one" / ".new-0123").write_bytes(dump(manifest)[:50])
    workspaces.sweep()
    assert [path.name for path in (home / "trees").iterdir()] == [manifest.upper]
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("tool")).ok
