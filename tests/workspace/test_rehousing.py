"""A workspace gets another id, with its files, its checkpoints and its packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from skep.errors import Conflict, NotFound, WorkspaceBusy
from skep.workspace import manifest as manifests
from skep.workspace.rehousing import rehouse
from skep.workspace.workspaces import Workspaces

LABELS = {"account": "bees"}


async def move(workspaces: Workspaces, old: str = "hv-one", new: str = "s-1") -> None:
    await rehouse(workspaces, old, new, labels=LABELS)


@pytest.fixture
async def garden(workspaces: Workspaces) -> Workspaces:
    await workspaces.create("hv-one")
    async with workspaces.enter("hv-one") as sandbox:
        await sandbox.run("echo sown > bed")
    await workspaces.checkpoint("hv-one", "spring")
    return workspaces


async def bed(workspaces: Workspaces, workspace_id: str) -> str:
    async with workspaces.enter(workspace_id) as sandbox:
        return (await sandbox.run("cat bed")).text


async def test_everything_goes_along_and_nothing_is_copied(garden: Workspaces) -> None:
    before, trees = garden.show("hv-one"), garden.trees.all()
    await move(garden)
    after = garden.show("s-1")
    assert (after.id, after.labels, after.upper, after.checkpoints) == ("s-1", LABELS, before.upper, before.checkpoints)
    assert garden.trees.all() == trees
    assert [one.id for one in garden.list()] == ["s-1"]
    garden.sweep()
    assert await bed(garden, "s-1") == "sown\n"


async def test_a_crash_in_the_middle_is_finished_by_the_next_call(garden: Workspaces) -> None:
    folder = garden.register.path("hv-one")
    manifests.write(folder, manifests.read(folder).changed(id="s-1"))  # what is done first
    await move(garden)
    assert await bed(garden, "s-1") == "sown\n"


async def test_the_copy_beside_the_files_has_the_new_id_too(garden: Workspaces) -> None:
    await move(garden)
    (garden.register.path("s-1") / manifests.NAME).unlink()
    garden.recover("s-1")
    assert await bed(garden, "s-1") == "sown\n"


async def test_one_that_cannot_be_read_is_moved_as_it_is(garden: Workspaces) -> None:
    (garden.register.path("hv-one") / manifests.NAME).write_bytes(b"{")
    await move(garden)
    assert (garden.register.path("s-1") / manifests.NAME).read_bytes() == b"{"


async def test_a_plain_folder_of_files_moves_too(workspaces: Workspaces, home: Path) -> None:
    folder = home / "workspaces" / "hv-one"
    folder.mkdir(parents=True)
    (folder / "bed").write_text("sown\n")
    await move(workspaces)
    assert (home / "workspaces" / "s-1" / "bed").read_text() == "sown\n"


async def test_one_in_use_and_an_id_that_is_taken_are_refused(garden: Workspaces) -> None:
    async with garden.hold("hv-one"):
        with pytest.raises(WorkspaceBusy):
            await move(garden)
    await garden.create("s-1")
    with pytest.raises(Conflict, match="s-1"):
        await move(garden)
    with pytest.raises(NotFound):
        await move(garden, "nobody", "s-2")
    assert await bed(garden, "hv-one") == "sown\n"
