"""Workspaces come into being, are held, listed and done away with, in layers and as copies alike."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skep.errors import Conflict, InvalidRequest, NotFound, WorkspaceBusy, WorkspaceDamaged
from skep.workspace import manifest as manifests
from skep.workspace.manifest import MARK
from skep.workspace.workspaces import Workspaces


async def test_a_new_workspace_shows_the_snapshot_and_the_usual_folders(workspaces: Workspaces) -> None:
    manifest = await workspaces.create("hv-one")
    assert (manifest.template, manifest.parent) == ("minimal", None)
    async with workspaces.enter("hv-one") as sandbox:
        ran = await sandbox.run("tool; ls -A; test -w attachments -a -w output/display -a -w . && echo writable")
    assert ran.text.splitlines() == [
        "tool one", ".venv", "attachments", "hive", "node_modules", "output", "pyproject.toml", "writable"
    ]  # fmt: skip


async def test_what_is_written_is_there_the_next_time(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("echo kept > note; echo two > .venv/bin/tool; rm pyproject.toml")).ok
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("cat note; cat .venv/bin/tool; test -e pyproject.toml || echo gone")).text == (
            "kept\ntwo\ngone\n"
        )


async def test_workspaces_over_one_snapshot_do_not_see_each_other(workspaces: Workspaces, home: Path) -> None:
    for name in ("hv-one", "hv-two"):
        await workspaces.create(name)
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("echo changed > .venv/bin/tool; rm -r node_modules; echo 1 > mine")).ok
    async with workspaces.enter("hv-two") as sandbox:
        assert (await sandbox.run("tool; ls node_modules; test -e mine || echo no")).text == "tool one\nsmall\nno\n"
    tree = next((home / "snapshots" / "minimal").glob("v*")) / "tree"
    assert (tree / ".venv/bin/tool").read_text() == "#!/bin/sh\necho tool one\n"


async def test_a_workspace_that_is_there_is_not_made_again(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    with pytest.raises(Conflict, match="there is a workspace hv-one already"):
        await workspaces.create("hv-one")


async def test_one_process_holds_a_workspace_and_others_are_told_which(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one"):
        with pytest.raises(WorkspaceBusy, match=f"held by process {os.getpid()}"):
            async with workspaces.hold("hv-one"):
                pass
    async with workspaces.hold("hv-one") as again:
        assert again.id == "hv-one"


async def test_whoever_finds_a_workspace_held_joins_its_sandbox(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.enter("hv-one") as first, workspaces.enter("hv-one") as second:
        assert (await first.run("echo shared > /tmp/note")).ok
        assert (await second.run("cat /tmp/note")).text == "shared\n"
        assert first.id == second.id


async def test_a_destroyed_workspace_leaves_nothing(workspaces: Workspaces, home: Path) -> None:
    await workspaces.create("hv-one")
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("mkdir -p deep/er && echo x > deep/er/file && chmod 0 deep")).ok
    await workspaces.checkpoint("hv-one")
    await workspaces.destroy("hv-one")
    assert workspaces.list() == []
    assert list((home / "trees").iterdir()) == []
    assert [path.name for path in (home / "workspaces").iterdir()] == [".lock"]
    with pytest.raises(NotFound):
        workspaces.show("hv-one")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "A", "-a", "a" * 64, "a\n", "a b", "ä", ".gone-x", "a\0", "hv_1"]
)
async def test_hostile_ids_are_refused_before_anything_is_touched(
    workspaces: Workspaces, home: Path, name: str
) -> None:
    before = sorted(home.rglob("*"))
    for attempt in (workspaces.create(name), workspaces.destroy(name), workspaces.act(name, "checkpoint")):
        with pytest.raises(InvalidRequest, match="not a valid id"):
            await attempt
    await workspaces.create("hv-one")
    with pytest.raises(InvalidRequest, match="not a valid id"):
        await workspaces.fork("hv-one", ["good", name])
    assert [manifest.id for manifest in workspaces.list()] == ["hv-one"]
    await workspaces.destroy("hv-one")
    new = {str(path.relative_to(home)) for path in {*home.rglob("*")} - {*before}}
    assert new <= {"workspaces", "workspaces/.lock", "trees", "snapshots/minimal/v0001-000000000001/lock"}


async def test_a_mark_that_is_lost_costs_nothing_of_the_agent_s(workspaces: Workspaces) -> None:
    await workspaces.create("one")
    async with workspaces.enter("one") as sandbox:
        await sandbox.files.write("mine", b"precious")
    (workspaces.register.path("one") / MARK).unlink()
    assert workspaces.sweep() == []
    for attempt in (workspaces.create("one"), workspaces.hold("one").__aenter__()):
        with pytest.raises(WorkspaceDamaged, match="lost the mark"):
            await attempt
    manifests.mark(workspaces.register.path("one"))
    async with workspaces.enter("one") as sandbox:
        assert await sandbox.files.read("mine") == b"precious"
