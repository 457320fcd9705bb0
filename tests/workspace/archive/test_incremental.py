"""A save that follows another stores what has changed, and reads what may have changed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.workspace.archive.conftest import KEY
from tests.workspace.archive.likeness import likeness
from tests.workspace.archive.test_roundtrip import make_snapshot

from skep.errors import ArchiveDamaged
from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import Store, open_store

MIB = 1 << 20
LONG_AGO_NS = 10**18


def make(top: Path, *, files: int = 1500, size: int = 16_000) -> Path:
    rng = random.Random(files)
    for number in range(files):
        (top / f"d{number % 13}").mkdir(parents=True, exist_ok=True)
        (top / f"d{number % 13}" / f"f{number}").write_bytes(rng.randbytes(size))
    (top / "large").write_bytes(rng.randbytes(13 * MIB))
    return top


def bytes_read() -> int:
    """Return how much this process has read by system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


async def test_what_has_not_changed_is_not_stored_again(archive: Archive, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=300)
    first = await archive.save("w", [str(tree)])
    assert first.stored_bytes > first.size_bytes  # random bytes do not compress
    again = await archive.save("w", [str(tree)])
    assert again.stored_bytes == 0
    assert (await archive.save("another", [str(tree)])).stored_bytes == 0


async def test_one_new_file_costs_a_group_and_not_all_that_follow(folder_store: Store, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree")
    archive = Archive(folder_store, KEY)
    await archive.save("w", [str(tree)])
    before = (await archive.show("w")).tree
    (tree / "d0" / "a-new-one").write_bytes(os.urandom(5000))  # among the first of all
    await archive.save("w", [str(tree)])
    after = (await archive.show("w")).tree
    assert len(set(after.chunks) - set(before.chunks)) <= 4 < len(after.chunks) // 2


async def test_one_changed_block_of_a_large_file_costs_that_block(folder_store: Store, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=1)
    archive = Archive(folder_store, KEY)
    await archive.save("w", [str(tree)])
    with (tree / "large").open("r+b") as large:
        large.seek(5 * MIB)
        large.write(b"changed")
    assert (await archive.save("w", [str(tree)])).stored_bytes < 5 * MIB


@pytest.fixture
def remembering(folder_store: Store, tmp_path: Path) -> Archive:
    return Archive(folder_store, KEY, memory=tmp_path / "memory")


async def aged(archive: Archive, tree: Path) -> None:
    """Save, as if the files had been there for long; what has just changed is never remembered."""
    while (await archive.save("w", [str(tree)])).size_bytes * 0.1 < await cost(archive, tree):
        pass


async def cost(archive: Archive, tree: Path) -> int:
    before = bytes_read()
    await archive.save("w", [str(tree)])
    return bytes_read() - before


async def test_what_has_not_changed_is_not_read_again(remembering: Archive, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree")
    assert await cost(remembering, tree) > 30 * MIB
    await aged(remembering, tree)
    assert await cost(remembering, tree) < 3 * MIB
    await remembering.restore("w", tmp_path / "back")
    assert likeness(tmp_path / "back") == likeness(tree)


async def test_a_change_that_hides_its_time_and_size_is_noticed(remembering: Archive, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=20)
    victim = tree / "d1" / "f1"
    os.utime(victim, ns=(LONG_AGO_NS, LONG_AGO_NS))
    await aged(remembering, tree)
    victim.write_bytes(b"?" * victim.stat().st_size)
    os.utime(victim, ns=(LONG_AGO_NS, LONG_AGO_NS))
    os.setxattr(tree / "large", "user.new", b"attribute")
    await remembering.save("w", [str(tree)])
    await remembering.restore("w", tmp_path / "back")
    assert likeness(tmp_path / "back") == likeness(tree)


async def test_a_change_in_the_same_instant_as_a_save_is_noticed(remembering: Archive, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    victim = tmp_path / "tree" / "file"
    for number in range(10):
        victim.write_text(f"{number:4}")
        await remembering.save("w", [str(tmp_path / "tree")])
        victim.write_text(f"{number + 100:4}")
        await remembering.save("w", [str(tmp_path / "tree")])
        await remembering.restore("w", tmp_path / f"back{number}")
        assert (tmp_path / f"back{number}" / "file").read_text() == f"{number + 100:4}"


async def test_what_is_remembered_of_a_store_that_lost_it_is_stored_again(remembering: Archive, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=50)
    await aged(remembering, tree)
    for chunk in (tmp_path / "store" / "chunks").rglob("*"):
        if chunk.is_file():
            chunk.unlink()
    await remembering.save("w", [str(tree)])
    await remembering.restore("w", tmp_path / "back")
    assert likeness(tmp_path / "back") == likeness(tree)


async def test_a_snapshot_that_the_store_lost_a_chunk_of_is_stored_again(folder_store: Store, tmp_path: Path) -> None:
    archive = Archive(folder_store, KEY)
    (tmp_path / "tree").mkdir()
    snapshot = make_snapshot(tmp_path)
    await archive.save("w", [str(tmp_path / "tree")], snapshot=snapshot)
    for chunk in list(folder_store.list("chunks/")):
        folder_store.remove(chunk.name)
    await archive.save("w", [str(tmp_path / "tree")], snapshot=snapshot)
    await archive.restore_snapshot(snapshot.hash, tmp_path / "back")
    assert likeness(tmp_path / "back") == likeness(snapshot.tree)


async def test_a_damaged_chunk_that_was_removed_is_stored_again(folder_store: Store, tmp_path: Path) -> None:
    archive = Archive(folder_store, KEY)
    tree = make(tmp_path / "tree", files=5)
    await archive.save("w", [str(tree)])
    bad = next(iter(folder_store.list("chunks/"))).name
    folder_store.put(bad, b"x" * 1000)
    with pytest.raises(ArchiveDamaged, match=bad) as damage:
        await archive.restore("w", tmp_path / "back")
    assert "remove this object" in str(damage.value.hint)
    folder_store.remove(bad)
    await archive.save("w", [str(tree)])
    await archive.restore("w", tmp_path / "back")
    assert likeness(tmp_path / "back") == likeness(tree)


async def test_one_key_or_store_remembers_nothing_of_another(tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=50)
    await aged(Archive(open_store(str(tmp_path / "one")), KEY, memory=tmp_path / "memory"), tree)
    for number, (store, key) in enumerate([("two", KEY), ("one", bytes(32))]):
        archive = Archive(open_store(str(tmp_path / store)), key, memory=tmp_path / "memory")
        await archive.save("w", [str(tree)])
        await archive.restore("w", tmp_path / f"back{number}")
        assert likeness(tmp_path / f"back{number}") == likeness(tree)


@pytest.mark.parametrize("nonsense", [b"", b"nonsense", b"\x28\xb5\x2f\xfd\x04\x00\x11\x00\x00{}\x00"])
async def test_a_memory_of_nonsense_is_no_memory(remembering: Archive, tmp_path: Path, nonsense: bytes) -> None:
    tree = make(tmp_path / "tree", files=5)
    await remembering.save("w", [str(tree)])
    [memory] = (tmp_path / "memory").iterdir()
    assert memory.stat().st_mode & 0o077 == 0
    memory.write_bytes(nonsense)
    await remembering.save("w", [str(tree)])
    await remembering.restore("w", tmp_path / "back")
    assert likeness(tmp_path / "back") == likeness(tree)
