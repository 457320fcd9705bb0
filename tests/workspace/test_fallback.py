"""A workspace of which folders are missing goes back to its last good state, and what is left of it is kept."""

from __future__ import annotations

import pytest

from skep.errors import NotFound, WorkspaceBusy, WorkspaceDamaged
from skep.sandbox.erase import erase
from skep.workspace.fallback import step_back
from skep.workspace.grounds import Layering
from skep.workspace.workspaces import Workspaces

ID = "hv-one"


async def write(workspaces: Workspaces, command: str) -> str:
    async with workspaces.enter(ID) as sandbox:
        ran = await sandbox.run(command)
        assert ran.ok, ran.error_text
        return ran.text


def lose(workspaces: Workspaces, *trees: str) -> None:
    for tree_id in trees:
        folder = workspaces.trees.folder / tree_id
        erase(str(folder), folder.stat().st_ino)  # the kernel leaves folders there that even their owner may not read


@pytest.fixture
async def kept(workspaces: Workspaces) -> Workspaces:
    """A workspace with the checkpoints spring and summer, and something written after both."""
    await workspaces.create(ID)
    for season in ("spring", "summer"):
        await write(workspaces, f"echo {season} > bed; echo {season} > {season}")
        await workspaces.checkpoint(ID, season)
    await write(workspaces, "echo autumn > bed")
    return workspaces


async def test_one_that_is_whole_stays_as_it_is(kept: Workspaces) -> None:
    before = kept.show(ID)
    assert await step_back(kept, ID) is None
    assert kept.show(ID) == before


async def test_without_the_tree_that_was_written_it_is_back_at_the_newest_checkpoint(kept: Workspaces) -> None:
    lose(kept, kept.show(ID).upper)
    back = await step_back(kept, ID)
    assert back is not None and "(summer)" in (back.to or "") and back.remains is None
    assert await write(kept, "cat bed; echo again > bed; cat bed") == "summer\nagain\n"
    assert [one.name for one in kept.show(ID).checkpoints] == ["spring", "summer"]
    (told,) = back.lost()
    assert told.startswith("everything since the checkpoint ")


async def test_a_checkpoint_that_is_not_whole_is_passed_over_and_what_is_left_can_be_returned_to(
    kept: Workspaces, layering: Layering
) -> None:
    manifest = kept.show(ID)
    spring, summer = (one.state.layers for one in manifest.checkpoints)
    lose(kept, *({*summer} - {*spring}), *([manifest.upper] if layering == "copy" else []))
    back = await step_back(kept, ID)
    assert back is not None and "(spring)" in (back.to or "")
    assert await write(kept, "cat bed; ls summer 2>/dev/null || true") == "spring\n"
    assert any("summer" in told for told in back.lost())
    if layering == "overlay":  # what was written last is there still, as a checkpoint
        assert back.remains is not None
        await kept.rollback(ID, back.remains)
        assert await write(kept, "cat bed") == "autumn\n"


async def test_a_checkpoint_alone_that_lost_its_files_does_not_touch_the_present(kept: Workspaces) -> None:
    await write(kept, "echo winter > bed")
    await kept.checkpoint(ID, "winter")
    await kept.rollback(ID, "spring")
    manifest = kept.show(ID)
    needed = {manifest.upper, *manifest.layers}
    lose(kept, *({*manifest.checkpoint("winter").state.layers} - needed))
    back = await step_back(kept, ID)
    assert back is not None and back.to is None and any("winter" in title for title in back.broken)
    assert await write(kept, "cat bed") == "spring\n"


async def test_with_no_good_state_nothing_is_changed_and_that_is_said(workspaces: Workspaces) -> None:
    await workspaces.create(ID)
    before = workspaces.show(ID)
    lose(workspaces, before.upper)
    with pytest.raises(WorkspaceDamaged, match="none of its checkpoints is whole"):
        await step_back(workspaces, ID)
    assert workspaces.show(ID) == before


async def test_one_in_use_or_not_there_is_left_alone(kept: Workspaces) -> None:
    async with kept.hold(ID):
        with pytest.raises(WorkspaceBusy):
            await step_back(kept, ID)
    with pytest.raises(NotFound):
        await step_back(kept, "hv-two")


async def test_what_is_left_survives_a_sweep(kept: Workspaces, layering: Layering) -> None:
    manifest = kept.show(ID)
    lose(kept, manifest.layers[0] if layering == "overlay" else manifest.upper)
    back = await step_back(kept, ID)
    kept.sweep()
    assert back is not None
    if back.remains is None:  # a copy is one tree, of which nothing is left without it
        assert (layering, await write(kept, "cat bed")) == ("copy", "summer\n")
        return
    await kept.rollback(ID, back.remains)
    assert await write(kept, "cat bed") == "autumn\n"
