"""Forks begin with what another workspace holds, share it, and from then on know nothing of each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.workspace.conftest import MakeWorkspaces
from tests.workspace.test_checkpoint import busy
from tests.workspace.tree_hash import tree_hash

from skep.errors import Conflict, InvalidRequest, NotFound
from skep.workspace.grounds import Layering
from skep.workspace.workspaces import Workspaces


async def parent(workspaces: Workspaces) -> None:
    """Make a workspace with something of everything in it."""
    await workspaces.create("parent")
    async with workspaces.enter("parent") as sandbox:
        ran = await sandbox.run(
            "echo mine > note; mkdir -p a/b; echo deep > a/b/c; rm -r node_modules; ln -s note link; chmod 600 note;"
            " chmod 751 ."
        )
        assert ran.ok


async def test_forks_begin_alike_and_never_see_later_writes_of_others(workspaces: Workspaces) -> None:
    await parent(workspaces)
    async with workspaces.hold("parent") as held:
        source = await held.sandbox()
        before = await tree_hash(source)
        await workspaces.fork("parent", ["one", "two"])
        assert await held.sandbox() is source, "the parent's sandbox goes on"
        assert (await source.run("echo parent > note; rm -r a; mkdir node_modules; echo p > node_modules/p")).ok
        async with workspaces.enter("one") as one, workspaces.enter("two") as two:
            assert await tree_hash(one) == await tree_hash(two) == before
            assert (await one.run("echo one > note; echo x > a/b/new; rm .venv/bin/tool")).ok
            assert await tree_hash(two) == before
            assert (await two.run("rm -r a; mkdir a; echo two > a/only")).ok
            hashes = [await tree_hash(sandbox) for sandbox in (source, one, two)]
            assert len({before, *hashes}) == 4
    for name, known in zip(("parent", "one", "two"), hashes, strict=True):
        async with workspaces.enter(name) as sandbox:
            assert await tree_hash(sandbox) == known


async def test_a_fork_of_a_busy_workspace_ends_nothing_and_is_whole(workspaces: Workspaces) -> None:
    await parent(workspaces)
    async with workspaces.hold("parent") as held:
        source = await held.sandbox()
        await busy(source)
        upper = held.manifest.upper
        await workspaces.fork("parent", ["one"])
        assert held.manifest.upper == upper, "what runs goes on writing where it wrote"
        assert (await source.run('t=$(cat ticks); while [ "$(cat ticks)" = "$t" ]; do :; done')).ok
        async with workspaces.enter("one") as one:
            ran = await one.run("cat note a/b/c; test -e node_modules || echo gone; test -e ticks && echo there")
            assert ran.text == "mine\ndeep\ngone\nthere\n"


async def test_a_child_outlives_its_parent_and_its_siblings(workspaces: Workspaces, home: Path) -> None:
    await parent(workspaces)
    await workspaces.fork("parent", ["one", "two"])
    async with workspaces.enter("one") as sandbox:
        before = await tree_hash(sandbox)
    await workspaces.fork("one", ["grandchild"])
    for name in ("parent", "two", "one"):
        await workspaces.destroy(name)
    async with workspaces.enter("grandchild") as sandbox:
        assert await tree_hash(sandbox) == before
    await workspaces.destroy("grandchild")
    assert list((home / "trees").iterdir()) == []


@pytest.mark.parametrize("layering", ["overlay"], indirect=True)
async def test_a_hundred_forks_share_everything(workspaces: Workspaces, home: Path) -> None:
    await parent(workspaces)
    async with workspaces.enter("parent") as sandbox:
        assert (await sandbox.run("head -c 5000000 /dev/urandom > large")).ok
        before = await tree_hash(sandbox)
    room = disk_use(home)
    names = [f"fork-{number}" for number in range(100)]
    made = await workspaces.fork("parent", names)
    assert [child.id for child in made] == names
    assert all(child.parent == "parent" for child in made)
    assert (disk_use(home) - room) / 100 <= 100_000, "a fork takes next to nothing"
    assert len({child.layers for child in made}) == 1
    if os.geteuid() == 0:
        owners = {(home / "trees" / child.upper / "tree").stat().st_uid for child in made}
        assert len(owners) == 100, "each has a user of its own"
    for name in (names[0], names[57], names[99]):
        async with workspaces.enter(name) as sandbox:
            assert await tree_hash(sandbox) == before
            assert (await sandbox.run(f"echo {name} > note && cat note")).text == f"{name}\n"


def disk_use(folder: Path) -> int:
    found = (path.lstat() for path in folder.rglob("*"))
    return sum(size for size in {stat.st_ino: stat.st_blocks * 512 for stat in found}.values())


async def test_a_clone_carries_the_checkpoints_and_a_fork_does_not(workspaces: Workspaces) -> None:
    await parent(workspaces)
    kept = await workspaces.checkpoint("parent", "early")
    async with workspaces.enter("parent") as sandbox:
        early = await tree_hash(sandbox)
        assert (await sandbox.run("echo later > note")).ok
    assert (await workspaces.fork("parent", ["forked"]))[0].checkpoints == ()
    with pytest.raises(NotFound, match="no checkpoint"):
        await workspaces.rollback("forked", kept.id)
    clone = await workspaces.clone("parent", "cloned")
    assert [known.id for known in clone.checkpoints] == [kept.id]
    await workspaces.destroy("parent")
    await workspaces.rollback("cloned", "early")
    async with workspaces.enter("cloned") as sandbox:
        assert await tree_hash(sandbox) == early


async def test_a_fork_under_a_taken_name_makes_none_of_them(workspaces: Workspaces, home: Path) -> None:
    await parent(workspaces)
    await workspaces.create("taken")
    with pytest.raises(Conflict, match="taken"):
        await workspaces.fork("parent", ["fresh", "taken"])
    with pytest.raises(InvalidRequest, match="given twice"):
        await workspaces.fork("parent", ["same", "same"])
    with pytest.raises(NotFound):
        await workspaces.fork("nobody", ["fresh"])
    assert [manifest.id for manifest in workspaces.list()] == ["parent", "taken"]


async def test_a_workspace_in_layers_is_put_together_where_there_can_be_none(
    make_workspaces: MakeWorkspaces, layering: Layering
) -> None:
    workspaces = make_workspaces()
    await parent(workspaces)
    await workspaces.checkpoint("parent", "early")
    await workspaces.fork("parent", ["child"])
    async with workspaces.enter("child") as sandbox:
        assert (await sandbox.run("echo child > note; rm -r a")).ok
        known = await tree_hash(sandbox)
    async with workspaces.enter("parent") as sandbox:
        early = await tree_hash(sandbox)
        assert (await sandbox.run("echo changed > note")).ok
    other = make_workspaces(layering="copy" if layering == "overlay" else "overlay")
    async with other.enter("child") as sandbox:
        assert await tree_hash(sandbox) == known
        assert (await sandbox.run("echo more > more")).ok
        known = await tree_hash(sandbox)
    await other.rollback("parent", "early")
    async with other.enter("parent") as sandbox:
        assert await tree_hash(sandbox) == early
    async with workspaces.enter("child") as sandbox:
        assert await tree_hash(sandbox) == known
