"""A repair rebuilds what is broken from the snapshot and the manifest, and leaves the agent's own files as they are."""

from __future__ import annotations

import os
import shutil
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.workspace.orchard import Orchard, own_hash, said
from tests.workspace.tree_hash import tree_hash
from tests.workspace.ways import USUAL

from skep.errors import NotFound, WorkspaceBusy
from skep.workspace.grounds import Layering
from skep.workspace.health.health import examine
from skep.workspace.manifest import MARK, NAME
from skep.workspace.workspaces import Workspaces

#: Fails unless everything that was installed can be used.
USE = "python -c 'import pear, apple, tinypkg' && node -e 'require(\"pear\"); require(\"tinypkg\")'"

DAMAGES = (
    "rm -rf .venv",
    "rm .venv/bin/python",
    "rm -r .venv/lib/python3*/site-packages/tinypkg*",
    "rm -r .venv/lib/python3*/site-packages/apple*",
    "echo >> .venv/lib/python3*/site-packages/pear.py",
    "rm .venv/pyvenv.cfg",
    "chmod 0 .venv",
    "chmod -R a-w .venv; chmod 0 .venv/lib",
    "rm -rf .venv; ln -s /etc .venv",
    "rm -rf .venv; echo not a folder > .venv",
    "rm -rf node_modules",
    "rm -r node_modules/pear",
    "echo '{' > node_modules/tinypkg/package.json",
    "rm -rf node_modules; echo not a folder > node_modules",
    "echo '[project' > pyproject.toml",
    "echo '{' > package.json",
    "rm pyproject.toml package.json package-lock.json",
    "rm -rf .venv node_modules pyproject.toml package.json",
    "rm -r attachments output",
    "chmod 0 attachments",
)
#: Those that tell most where nothing lies below to return to.
COPIED = ("rm -rf .venv", "rm -r node_modules/pear") if USUAL == "overlay" else ()


@pytest.fixture
def layering() -> Layering:
    """Give the machine's own way to put workspaces together: a repair is the same in all, but where it says so."""
    return USUAL


@pytest.fixture(autouse=True)
def _open_market(orchard: Orchard) -> Iterator[None]:
    yield
    orchard.market.closed = False


async def hurt(workspaces: Workspaces, workspace_id: str, damage: str) -> str:
    """Do damage, and return the hash of the agent's own files."""
    async with workspaces.enter(workspace_id) as sandbox:
        before = await own_hash(sandbox)
        await said(sandbox, damage)
    return before


@pytest.mark.parametrize(
    ("damage", "layering"), [*((damage, USUAL) for damage in DAMAGES), *((damage, "copy") for damage in COPIED)]
)
async def test_what_is_damaged_works_again_and_the_agents_files_keep_their_hash(
    orchard: Orchard, layering: Layering, damage: str
) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.ripe(workspaces)
    before = await hurt(workspaces, workspace_id, damage)
    assert (await examine(workspaces, workspace_id)).troubles
    repaired = await orchard.repair(workspaces, workspace_id)
    assert repaired.done
    assert repaired.left == ()
    async with workspaces.enter(workspace_id) as sandbox:
        await said(sandbox, USE)
        assert await own_hash(sandbox) == before


async def test_a_broken_file_is_kept_under_another_name(orchard: Orchard, layering: Layering) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.ripe(workspaces)
    await hurt(workspaces, workspace_id, "echo '[project' > pyproject.toml")
    repaired = await orchard.repair(workspaces, workspace_id)
    assert repaired.done == ("kept the broken pyproject.toml as pyproject.toml.broken", "wrote pyproject.toml again")
    async with workspaces.enter(workspace_id) as sandbox:
        assert await said(sandbox, "cat pyproject.toml.broken") == "[project\n"
        declared = tomllib.loads(await said(sandbox, "cat pyproject.toml"))["project"]["dependencies"]
        assert declared == ["tinypkg", "pear>=1.0"]


async def test_nothing_is_done_to_a_healthy_workspace(orchard: Orchard, layering: Layering) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.ripe(workspaces)
    async with workspaces.enter(workspace_id) as sandbox:
        before = await tree_hash(sandbox)
    repaired = await orchard.repair(workspaces, workspace_id)
    assert (repaired.done, repaired.left) == ((), ())
    async with workspaces.enter(workspace_id) as sandbox:
        assert await tree_hash(sandbox) == before


async def test_a_repaired_environment_is_the_snapshots_and_takes_no_room(orchard: Orchard) -> None:
    workspaces = orchard.workspaces("overlay")
    workspace_id = await orchard.planted(workspaces)
    await hurt(workspaces, workspace_id, "rm -rf .venv; cp -r /etc/ssl .venv; rm -rf node_modules")
    orchard.market.closed = True  # nothing but the snapshot is needed
    repaired = await orchard.repair(workspaces, workspace_id)
    assert repaired.left == ()
    upper = workspaces.trees.tree(workspaces.show(workspace_id).upper)
    assert not (upper / ".venv").exists()
    assert not (upper / "node_modules").exists()


@pytest.mark.parametrize("damage", ["rm -rf .venv node_modules", "rm .venv/lib/python3*/site-packages/tinypkg.py"])
async def test_damage_that_a_checkpoint_has_kept_is_repaired_and_the_checkpoint_stays(
    orchard: Orchard, layering: Layering, damage: str
) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.ripe(workspaces)
    before = await hurt(workspaces, workspace_id, damage)
    async with workspaces.enter(workspace_id) as sandbox:
        damaged = await tree_hash(sandbox)
    await workspaces.checkpoint(workspace_id, "damaged")
    assert (await orchard.repair(workspaces, workspace_id)).left == ()
    async with workspaces.enter(workspace_id) as sandbox:
        await said(sandbox, USE)
        assert await own_hash(sandbox) == before
    await workspaces.rollback(workspace_id, "damaged")
    async with workspaces.enter(workspace_id) as sandbox:
        assert await tree_hash(sandbox) == damaged


async def test_what_the_agent_has_declared_itself_is_installed_too(orchard: Orchard) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    await hurt(workspaces, workspace_id, 'sed -i \'s/"tinypkg",/"tinypkg", "apple<2",/\' pyproject.toml')
    assert (await orchard.repair(workspaces, workspace_id)).left == ()
    async with workspaces.enter(workspace_id) as sandbox:
        assert await said(sandbox, "python -c 'import apple; print(apple.VERSION)'") == "1.0\n"


async def test_a_package_that_is_declared_and_cannot_be_had_stops_nothing_else(orchard: Orchard) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.ripe(workspaces)
    nowhere = 'sed -i \'s/"tinypkg",/"tinypkg", "nowhere-to-be-found",/\' pyproject.toml; rm -r .venv'
    await hurt(workspaces, workspace_id, nowhere)
    repaired = await orchard.repair(workspaces, workspace_id)
    assert "rebuilt .venv from the snapshot" in repaired.done
    assert not repaired.ok
    assert all("nowhere-to-be-found" in finding.message for finding in repaired.left)
    async with workspaces.enter(workspace_id) as sandbox:
        await said(sandbox, USE)


async def test_a_repair_that_cannot_get_its_packages_makes_nothing_worse(orchard: Orchard, layering: Layering) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.ripe(workspaces)
    await hurt(workspaces, workspace_id, "rm .venv/lib/python3*/site-packages/tinypkg.py")
    async with workspaces.enter(workspace_id) as sandbox:
        before = await tree_hash(sandbox)
    orchard.market.closed = True
    repaired = await orchard.repair(workspaces, workspace_id)
    assert not repaired.ok
    assert any("cannot be rebuilt" in finding.message for finding in repaired.left)
    async with workspaces.enter(workspace_id) as sandbox:
        assert await tree_hash(sandbox) == before
        await said(sandbox, "python -c 'import pear'")


async def test_a_lost_mark_is_written_again(orchard: Orchard, layering: Layering) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.ripe(workspaces)
    before = await hurt(workspaces, workspace_id, "true")
    (workspaces.register.path(workspace_id) / MARK).unlink()
    repaired = await orchard.repair(workspaces, workspace_id)
    assert repaired.done == (f"wrote {MARK} again",)
    assert repaired.left == ()
    async with workspaces.enter(workspace_id) as sandbox:
        assert await own_hash(sandbox) == before


@pytest.mark.parametrize("part", [0.5, 0.0])
async def test_a_half_written_manifest_is_written_again_and_kept(
    orchard: Orchard, layering: Layering, part: float
) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.ripe(workspaces)
    before = await hurt(workspaces, workspace_id, "true")
    manifest, file = workspaces.show(workspace_id), workspaces.register.path(workspace_id) / NAME
    broken = file.read_bytes()[: int(part * file.stat().st_size)]
    file.write_bytes(broken)
    repaired = await orchard.repair(workspaces, workspace_id)
    assert (repaired.left, workspaces.show(workspace_id)) == ((), manifest)
    assert file.with_name(f"{NAME}.broken").read_bytes() == broken
    async with workspaces.enter(workspace_id) as sandbox:
        assert await own_hash(sandbox) == before


async def test_a_folder_that_is_gone_is_made_again(orchard: Orchard, layering: Layering) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.ripe(workspaces)
    before = await hurt(workspaces, workspace_id, "true")
    shutil.rmtree(workspaces.register.path(workspace_id))
    assert (await orchard.repair(workspaces, workspace_id)).left == ()
    async with workspaces.enter(workspace_id) as sandbox:
        assert await own_hash(sandbox) == before


async def test_a_workspace_that_is_nowhere_is_not_found(orchard: Orchard) -> None:
    with pytest.raises(NotFound):
        await orchard.repair(orchard.workspaces(), "nowhere")


async def test_files_of_another_user_are_given_back(orchard: Orchard) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    before = await hurt(workspaces, workspace_id, "true")
    tree = workspaces.trees.tree(workspaces.show(workspace_id).upper)
    for path in (tree / "src", tree / "src" / "deep", tree / "note"):
        os.chown(path, 0, 0)
    assert (await orchard.repair(workspaces, workspace_id)).left == ()
    async with workspaces.enter(workspace_id) as sandbox:
        assert await own_hash(sandbox) == before
        await said(sandbox, "echo more >> note; touch src/deep/two")


async def test_a_link_in_the_place_of_a_usual_folder_leads_a_repair_nowhere(orchard: Orchard, tmp_path: Path) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    outside = tmp_path / "display"
    outside.mkdir(mode=0o500)
    await hurt(workspaces, workspace_id, f"rm -r output; ln -s {tmp_path} output; chmod 0 attachments")
    repaired = await orchard.repair(workspaces, workspace_id)
    assert "gave files back to the user of the workspace" in repaired.done
    assert stat.S_IMODE(outside.stat().st_mode) == 0o500


async def test_a_workspace_that_another_process_holds_is_busy(orchard: Orchard) -> None:
    async with orchard.workspace() as workspace:
        await said(await workspace.sandbox(), "rm .venv/bin/python")
        with pytest.raises(WorkspaceBusy):
            await orchard.repair(orchard.workspaces(), workspace.id)


async def test_a_package_script_cannot_use_a_repair_to_change_the_agents_files(orchard: Orchard) -> None:
    workspaces = orchard.workspaces()
    workspace_id = await orchard.planted(workspaces)
    await orchard.install_into(workspaces, workspace_id, node=["scripted"])
    before = await hurt(workspaces, workspace_id, "rm -rf node_modules")
    assert (await orchard.repair(workspaces, workspace_id)).left == ()
    async with workspaces.enter(workspace_id) as sandbox:
        assert await said(sandbox, "cat node_modules/scripted/built.txt") == "built\n"
        assert await own_hash(sandbox) == before
