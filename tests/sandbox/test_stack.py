"""A workspace in layers: what is written, what is shared, what can be swapped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skep.errors import InvalidRequest, SandboxUnusable, WorkspaceBusy
from skep.sandbox.layering import layering
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount, Stack

IS_ROOT = os.geteuid() == 0


@pytest.fixture(autouse=True)
def layers_are_possible() -> None:
    if layering() == "none":
        pytest.skip("this kernel mounts no overlay for an ordinary user")


def tree(top: Path, **files: str) -> Path:
    top.mkdir(parents=True)
    for name, text in files.items():
        (top / name).write_text(text)
    return top


def stack(top: Path, *layers: Path) -> Stack:
    for part in ("tree", "work"):
        (top / part).mkdir(parents=True, exist_ok=True)
    return Stack(str(top / "tree"), str(top / "work"), tuple(str(layer) for layer in layers))


def over(top: Path, below: Stack) -> Stack:
    """Return a new upper over a stack whose own upper becomes a layer."""
    above = stack(top, Path(below.upper), *(Path(layer) for layer in below.layers))
    owner = Path(below.upper).stat()
    os.chown(above.upper, owner.st_uid, owner.st_gid)
    return above


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    return tree(tmp_path / "layer", below="of the layer\n")


async def test_layers_are_read_and_never_written(tmp_path: Path, layer: Path) -> None:
    (layer / "folder").mkdir()
    (layer / "folder" / "inner").write_text("deep\n")
    async with Sandbox.create(stack=stack(tmp_path / "top", layer)) as sandbox:
        seen = await sandbox.run("cat below folder/inner; echo more >>below; rm -r folder; mkdir folder; ls -A folder")
        assert seen.text == "of the layer\ndeep\n"
        assert await sandbox.files.read("below") == b"of the layer\nmore\n"
    assert (layer / "below").read_text() == "of the layer\n"
    assert (layer / "folder" / "inner").read_text() == "deep\n"


async def test_the_uppermost_layer_wins(tmp_path: Path) -> None:
    layers = [tree(tmp_path / name, same=name, **{name: name}) for name in ("first", "second", "third")]
    async with Sandbox.create(stack=stack(tmp_path / "top", *layers)) as sandbox:
        assert (await sandbox.run("cat same; echo; ls")).text == "first\nfirst\nsame\nsecond\nthird\n"


async def test_what_was_written_is_there_the_next_time(tmp_path: Path, layer: Path) -> None:
    mine = stack(tmp_path / "top", layer)
    async with Sandbox.create(stack=mine) as sandbox:
        await sandbox.run("echo kept >mine; rm below")
    async with Sandbox.create(stack=mine) as sandbox:
        assert (await sandbox.run("cat mine; ls")).text == "kept\nmine\n"


async def test_a_hundred_layers_make_one_workspace(tmp_path: Path) -> None:
    layers = [tree(tmp_path / f"layer-{number}", **{f"file-{number}": str(number)}) for number in range(100)]
    async with Sandbox.create(stack=stack(tmp_path / "top", *layers)) as sandbox:
        assert (await sandbox.run("ls | wc -l; cat file-99")).text.split() == ["100", "99"]


async def test_a_stack_without_layers_is_a_plain_folder(tmp_path: Path) -> None:
    async with Sandbox.create(stack=stack(tmp_path / "top")) as sandbox:
        await sandbox.run("echo mine >mine")
    assert (tmp_path / "top" / "tree" / "mine").read_text() == "mine\n"


@pytest.mark.skipif(not IS_ROOT, reason="only root has folders of several owners")
async def test_layers_of_any_owner_belong_to_the_agent(tmp_path: Path, layer: Path) -> None:
    other = tree(tmp_path / "other", theirs="of another\n")
    other.chmod(0o700)
    for path in (other, other / "theirs"):
        os.chown(path, 0x70000007, 0x70000007)
    async with Sandbox.create(stack=stack(tmp_path / "top", other, layer)) as sandbox:
        seen = await sandbox.run("stat -c %U theirs below; echo and mine >>theirs; cat theirs")
        assert seen.text == "agent\nagent\nof another\nand mine\n"
    assert (other / "theirs").read_text() == "of another\n"


async def test_only_what_is_written_counts_against_the_disk(tmp_path: Path, layer: Path) -> None:
    (layer / "large").write_bytes(os.urandom(64 * MIB))
    limits = Limits(disk_bytes=32 * MIB)
    async with Sandbox.create(stack=stack(tmp_path / "top", layer), limits=limits) as sandbox:
        assert (await sandbox.run("head -c 1M /dev/urandom >small")).ok
        flood = await sandbox.run("for i in $(seq 200); do head -c 8M /dev/urandom >part-$i; done", timeout_s=60)
        assert flood.limit == "disk"


async def test_another_stack_is_laid_while_the_sandbox_lives(tmp_path: Path, layer: Path) -> None:
    before = stack(tmp_path / "before", layer)
    async with Sandbox.create(stack=before) as sandbox:
        await sandbox.run("echo first >mine; echo kept >/tmp/note")
        await sandbox.restack(over(tmp_path / "after", before))
        await sandbox.run("echo second >>mine")
        assert (await sandbox.run("cat mine /tmp/note")).text == "first\nsecond\nkept\n"
        await sandbox.restack(before)
        assert await sandbox.files.read("mine") == b"first\n"


async def test_with_something_running_the_workspace_stays(tmp_path: Path, layer: Path) -> None:
    before = stack(tmp_path / "before", layer)
    async with Sandbox.create(stack=before) as sandbox:
        job = await sandbox.background("exec sleep 60")
        with pytest.raises(WorkspaceBusy):
            await sandbox.restack(over(tmp_path / "after", before))
        await sandbox.run("echo here >mine")
        await job.kill()
    assert (tmp_path / "before" / "tree" / "mine").exists()


async def test_commands_that_come_during_a_swap_wait_for_it(tmp_path: Path, layer: Path) -> None:
    below = stack(tmp_path / "0", layer)
    async with Sandbox.create(stack=below) as sandbox:
        for number in range(1, 11):
            above = over(tmp_path / str(number), below)
            writes = [asyncio.create_task(sandbox.files.write(f"{number}-{part}", b"x")) for part in range(40)]
            try:
                await sandbox.restack(above)
                below = above
            except WorkspaceBusy:
                pass
            await asyncio.gather(*writes)
            assert (await sandbox.run(f"ls {number}-* | wc -l")).text.strip() == "40"


async def test_a_file_on_its_way_in_keeps_the_workspace(tmp_path: Path, layer: Path) -> None:
    before = stack(tmp_path / "before", layer)
    started, more = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one "
        started.set()
        await more.wait()
        yield b"two"

    async with Sandbox.create(stack=before) as sandbox:
        writing = asyncio.create_task(sandbox.files.write("slow", pieces()))
        await started.wait()
        with pytest.raises(WorkspaceBusy, match="being written"):
            await sandbox.restack(over(tmp_path / "after", before))
        more.set()
        await writing
        assert await sandbox.files.read("slow") == b"one two"


async def test_folders_are_shown_below_the_workspace_as_asked(tmp_path: Path, layer: Path) -> None:
    shown = tree(tmp_path / "shown", memory="of the hive\n")
    shared, cache = tree(tmp_path / "shared"), tree(tmp_path / "cache", package="whole\n")
    before = stack(tmp_path / "before", layer)
    mounts = [
        Mount(str(shown), "/workspace/hive"),
        Mount(str(shared), "/workspace/ticket", "read-write"),
        Mount(str(cache), "/opt/packages", "scratch"),
    ]
    async with Sandbox.create(stack=before, mounts=mounts) as sandbox:
        for stacked in (before, over(tmp_path / "after", before)):
            await sandbox.restack(stacked)
            tried = await sandbox.run("cat hive/memory; echo no >hive/memory; echo note >ticket/note")
            assert (tried.text, "Read-only" in tried.error_text) == ("of the hive\n", True)
        changed = await sandbox.run("echo hole >/opt/packages/package; echo x >/opt/packages/new; cat /opt/packages/*")
        assert changed.text == "x\nhole\n"
    assert (shown / "memory").read_text() == "of the hive\n"
    assert (shared / "note").read_text() == "note\n"
    assert {path.name: path.read_text() for path in cache.iterdir()} == {"package": "whole\n"}


async def test_a_plain_folder_can_have_folders_shown_in_it(tmp_path: Path) -> None:
    shown = tree(tmp_path / "shown", memory="of the hive\n")
    async with Sandbox.create(tmp_path / "plain", mounts=[Mount(str(shown), "/workspace/hive")]) as sandbox:
        assert (await sandbox.run("cat hive/memory; rmdir hive")).text == "of the hive\n"


@pytest.mark.parametrize("inside", ["hive", "/workspace/../etc", "/workspace//hive", "/", "/workspace/a\0b", "/proc/x"])
async def test_a_place_that_cannot_be_is_refused(tmp_path: Path, inside: str) -> None:
    with pytest.raises(InvalidRequest):
        await Sandbox.create(tmp_path / "plain", mounts=[Mount(str(tree(tmp_path / "shown")), inside)])


async def test_a_layer_that_is_missing_is_named(tmp_path: Path, layer: Path) -> None:
    missing = tmp_path / "gone"
    with pytest.raises((SandboxUnusable, InvalidRequest), match="gone"):
        await Sandbox.create(stack=stack(tmp_path / "top", missing, layer))


async def test_a_swap_that_cannot_be_leaves_everything_as_it_was(tmp_path: Path, layer: Path) -> None:
    before = stack(tmp_path / "before", layer)
    async with Sandbox.create(stack=before) as sandbox:
        await sandbox.run("echo first >mine")
        impossible = over(tmp_path / "after", before)
        with pytest.raises((SandboxUnusable, InvalidRequest)):
            await sandbox.restack(Stack(impossible.upper, impossible.work, (str(tmp_path / "gone"),)))
        assert (await sandbox.run("cat mine below")).text == "first\nof the layer\n"


def test_the_work_folder_lies_beside_the_upper_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="in one folder"):
        Stack(str(tmp_path / "a" / "tree"), str(tmp_path / "b" / "work"))


async def test_a_sandbox_is_occupied_while_something_runs_in_it(tmp_path: Path, layer: Path) -> None:
    async with Sandbox.create(stack=stack(tmp_path / "top", layer)) as sandbox:
        assert not await sandbox.occupied()
        job = await sandbox.background("exec sleep 60")
        assert await sandbox.occupied()
        await job.kill()
        await job.wait()
        assert not await sandbox.occupied()


async def test_what_was_sealed_still_counts_against_the_disk(tmp_path: Path, layer: Path) -> None:
    write = "for i in 1 2 3; do head -c 4M /dev/urandom >part-{number}-$i; sleep 0.1; done"
    below = stack(tmp_path / "0", layer)
    async with Sandbox.create(stack=below, limits=Limits(disk_bytes=48 * MIB)) as sandbox:
        for number in range(1, 20):
            written = await sandbox.run(write.format(number=number))
            if written.limit == "disk":
                break
            above = over(tmp_path / str(number), below)
            await sandbox.restack(above)
            below = above
        assert written.limit == "disk"
