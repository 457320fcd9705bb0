"""A checkpoint keeps what a workspace holds, and a rollback brings exactly that back, in layers and as copies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.workspace.conftest import MakeWorkspaces
from tests.workspace.tree_hash import tree_hash

from skep.errors import InvalidRequest, NotFound
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.sandbox import Sandbox
from skep.workspace.held import MOST_LAYERS
from skep.workspace.workspaces import Workspaces

MESS = """
rm -r node_modules pyproject.toml output; mkdir -p node_modules/other; echo new > node_modules/other/x
echo two > .venv/bin/tool; mkdir pyproject.toml; echo in > pyproject.toml/file; ln -s /etc/passwd link
echo hidden > .dot; printf 'x' > "$(printf 'odd\\nname')"; mkfifo pipe; ln .dot twin; chmod 500 attachments
"""


async def test_a_rollback_brings_back_exactly_what_was_kept(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run("echo one > note; mkdir -p a/b; echo deep > a/b/c; chmod 640 note; chmod 750 .")).ok
        before = await tree_hash(sandbox)
        kept = await workspace.checkpoint("risky", note="before the mess")
        assert await tree_hash(sandbox) == before, "keeping it changes nothing"
        assert (await sandbox.run(MESS)).ok
        messy = await tree_hash(sandbox)
        undo = await workspace.rollback(kept.id)
        assert await tree_hash(await workspace.sandbox()) == before
        await workspace.rollback(undo.id)
        assert await tree_hash(await workspace.sandbox()) == messy
        await workspace.rollback("risky")
    async with workspaces.enter("hv-one") as sandbox:
        assert await tree_hash(sandbox) == before, "it is so in the next sandbox too"


async def test_the_sandbox_lives_on_through_a_checkpoint(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run("echo one > note; echo kept > /tmp/kept")).ok
        await workspace.checkpoint()
        assert await workspace.sandbox() is sandbox
        assert (await sandbox.run("cat /tmp/kept note; echo two >> note")).text == "kept\none\n"


async def busy(sandbox: Sandbox) -> None:
    """Set something going that writes all the time, and wait until it does."""
    await sandbox.background("n=0; while :; do n=$((n+1)); echo $n > ticks; done")
    while not (await sandbox.run("cat ticks")).text.strip():
        await asyncio.sleep(0.01)


async def test_a_checkpoint_ends_nothing_that_runs_and_later_writes_are_not_in_it(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run("mkdir many; for n in $(seq 50); do echo $n > many/$n; done; rm pyproject.toml")).ok
        await busy(sandbox)
        kept = await workspace.checkpoint()
        assert (await sandbox.run('t=$(cat ticks); while [ "$(cat ticks)" = "$t" ]; do :; done; echo runs')).ok
        assert (await sandbox.run("echo later > many/1")).ok
        await workspace.rollback(kept.id)
        again = await workspace.sandbox()
        assert (await again.run("cat many/1; ls many | wc -l; test -e pyproject.toml || echo gone")).text == (
            "1\n50\ngone\n"
        )
        assert (await again.run('a=$(cat ticks); sleep 0.05; test "$a" = "$(cat ticks)"')).ok, "the writer was ended"


async def test_copies_of_what_did_not_change_take_no_room(workspaces: Workspaces, home: Path) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run("head -c 3000000 /dev/urandom > large; sleep 0.1")).ok
        await busy(sandbox)
        first, second = [await workspace.checkpoint(name) for name in ("first", "second")]
        trees = [workspaces.trees.tree(kept.state.layers[0]) for kept in (first, second)]
        assert (trees[0] / "large").stat().st_ino == (trees[1] / "large").stat().st_ino
        assert (trees[0] / "large").stat().st_ino != (
            workspaces.trees.tree(workspace.manifest.upper) / "large"
        ).stat().st_ino
        room = workspaces.trees.weigh({kept.state.layers[0] for kept in (first, second)})
        assert 3_000_000 < room.size < 4_500_000
        assert (await sandbox.run("printf X | dd of=large bs=1 conv=notrunc")).ok
        third = await workspace.checkpoint("third")
        assert (workspaces.trees.tree(third.state.layers[0]) / "large").read_bytes()[:1] == b"X"
        await workspace.rollback("second")
        assert (await (await workspace.sandbox()).run("head -c 1 large")).stdout != b"X"


async def test_many_checkpoints_are_merged_and_nothing_is_lost(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    hashes = []
    async with workspaces.hold("hv-one") as workspace:
        for number in range(MOST_LAYERS + 4):
            sandbox = await workspace.sandbox()
            ran = await sandbox.run(
                f"n={number}; echo $n > f$n; rm -rf f{number - 3} d; mkdir d; echo $n > d/$n; echo $n > same"
            )
            assert ran.ok, ran.error_text
            hashes.append((await workspace.checkpoint(), await tree_hash(sandbox)))
    async with workspaces.hold("hv-one") as workspace:
        assert await tree_hash(await workspace.sandbox()) == hashes[-1][1]
        assert len(workspace.manifest.layers) <= MOST_LAYERS
        for kept, known in (hashes[0], hashes[10], hashes[-2]):
            await workspace.rollback(kept.id)
            assert await tree_hash(await workspace.sandbox()) == known


async def test_a_forgotten_checkpoint_gives_its_room_back(workspaces: Workspaces, home: Path) -> None:
    await workspaces.create("hv-one")
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("echo one > note")).ok
    first = await workspaces.checkpoint("hv-one", "first")
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("head -c 2000000 /dev/urandom > large")).ok
    second = await workspaces.checkpoint("hv-one", "second")
    undo = await workspaces.rollback("hv-one", "first")
    await workspaces.forget("hv-one", "second")
    await workspaces.forget("hv-one", undo.id)
    assert not list((home / "trees").glob("*/tree/large"))
    assert [kept.id for kept in workspaces.show("hv-one").checkpoints] == [first.id]
    with pytest.raises(NotFound, match="no checkpoint"):
        await workspaces.rollback("hv-one", second.id)
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("cat note; ls large")).text == "one\n"


async def test_another_process_asks_the_holder_to_keep_and_to_return(
    workspaces: Workspaces, make_workspaces: MakeWorkspaces
) -> None:
    await workspaces.create("hv-one")
    other = make_workspaces()
    async with workspaces.enter("hv-one") as sandbox:
        assert (await sandbox.run("echo one > note")).ok
        kept = await other.checkpoint("hv-one", "here")
        assert (await sandbox.run("echo two > note")).ok
        await other.rollback("hv-one", "here")
        assert (await sandbox.run("cat note")).text == "one\n"
        assert kept.id in [known.id for known in other.show("hv-one").checkpoints]
        with pytest.raises(NotFound, match="no checkpoint 'nowhere'"):
            await other.rollback("hv-one", "nowhere")


async def test_an_unchanged_workspace_is_kept_without_another_layer(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        await workspace.checkpoint()
        before = await tree_hash(await workspace.sandbox())
        layers = workspace.manifest.layers
        for _ in range(5):
            await workspace.checkpoint()
        assert workspace.manifest.layers == layers
        assert await tree_hash(await workspace.sandbox()) == before


async def test_what_checkpoints_hold_counts_against_the_quota(make_workspaces: MakeWorkspaces) -> None:
    workspaces = make_workspaces(limits=Limits(disk_bytes=60 * MIB))
    await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        assert (await (await workspace.sandbox()).run("head -c 30000000 /dev/urandom > large")).ok
        await workspace.checkpoint()
    async with workspaces.hold("hv-one") as workspace:
        sandbox = await workspace.sandbox()
        assert sandbox.limits.disk_bytes < 40 * MIB
        ran = await sandbox.run("head -c 45000000 /dev/zero > more")
        assert ran.limit == "disk"


async def test_a_name_that_would_garble_a_list_is_refused(workspaces: Workspaces) -> None:
    await workspaces.create("hv-one")
    for name in ("", "a\nb", " a", "x" * 101, "\x1b[2J"):
        with pytest.raises(InvalidRequest, match="not a usable name"):
            await workspaces.checkpoint("hv-one", name)
    assert workspaces.show("hv-one").checkpoints == ()
