"""Collecting removes what no archive needs, and nothing that a save relies on."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.workspace.archive.conftest import KEY
from tests.workspace.archive.likeness import likeness
from tests.workspace.archive.test_incremental import make
from tests.workspace.archive.test_roundtrip import make_snapshot

from skep.errors import ArchiveDamaged, ArchiveTooNew, Conflict, StoreUnavailable
from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import Store, open_store
from skep.workspace.archive.turns import STALE_S, collecting, saving

DEADLINE_S = 30


def chunks(store: Store) -> set[str]:
    return {stored.name for stored in store.list("chunks/")}


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.01)


async def test_chunks_go_with_the_last_archive_that_needs_them(store: Store, tmp_path: Path) -> None:
    archive = Archive(store, KEY)
    tree = make(tmp_path / "tree", files=100)
    await archive.save("w", [str(tree)])
    shared = chunks(store)
    (tree / "d0" / "f0").write_bytes(os.urandom(9000))
    second = await archive.save("w", [str(tree)])
    assert (await archive.collect()).chunks == 0
    assert await archive.delete("w", version=second.version) == [second.version]
    collected = await archive.collect()
    assert collected.chunks > 0
    assert collected.size_bytes > 9000
    assert chunks(store) == shared
    await archive.restore("w", tmp_path / "back")
    await archive.delete("w")
    await archive.collect()
    assert chunks(store) == set()
    assert await archive.list() == []
    assert list(store.list("turns/")) == []


async def test_a_snapshot_stays_as_long_as_a_workspace_stands_on_it(folder_store: Store, tmp_path: Path) -> None:
    archive = Archive(folder_store, KEY)
    (tmp_path / "tree").mkdir()
    snapshot = make_snapshot(tmp_path)
    for name in ("one", "two"):
        await archive.save(name, [str(tmp_path / "tree")], snapshot=snapshot)
    await archive.delete("one")
    await archive.collect()
    await archive.restore_snapshot(snapshot.hash, tmp_path / "back")
    await archive.delete("two")
    await archive.collect()
    assert list(folder_store.list("snapshots/")) == []
    assert chunks(folder_store) == set()


async def test_nothing_is_collected_while_an_archive_is_saved(store: Store) -> None:
    store.put("chunks/ab/abcdef", b"on its way into an archive")
    with saving(store, lambda: None):
        with pytest.raises(Conflict, match="being saved"):
            await Archive(store, KEY).collect()
        assert chunks(store) == {"chunks/ab/abcdef"}
        assert list(store.list("turns/collecting/")) == []
    assert (await Archive(store, KEY).collect()).chunks == 1


async def test_a_save_waits_until_the_collection_is_done(folder_store: Store, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=3)
    archive = Archive(folder_store, KEY)
    with collecting(folder_store):
        task = asyncio.create_task(archive.save("w", [str(tree)]))
        await eventually(lambda: bool(list(folder_store.list("turns/saving/"))))
        assert chunks(folder_store) == set()
        assert not task.done()
    await task
    await archive.restore("w", tmp_path / "back")


async def test_a_save_that_waits_can_be_cancelled(folder_store: Store, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=3)
    with collecting(folder_store):
        task = asyncio.create_task(Archive(folder_store, KEY).save("w", [str(tree)]))
        await eventually(lambda: bool(list(folder_store.list("turns/saving/"))))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(folder_store.list("turns/saving/")) == []


async def test_marks_of_the_dead_stop_nobody(folder_store: Store, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=3)
    for mark in ("turns/saving/dead", "turns/collecting/dead"):
        folder_store.put(mark, b"")
        path = tmp_path / "store" / mark
        os.utime(path, (path.stat().st_mtime - STALE_S - 10,) * 2)
    archive = Archive(folder_store, KEY)
    await archive.save("w", [str(tree)])
    await archive.collect()
    assert list(folder_store.list("turns/")) == []
    await archive.restore("w", tmp_path / "back")


async def test_a_save_whose_mark_was_taken_for_dead_makes_no_archive(folder_store: Store, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=300)
    archive = Archive(folder_store, KEY)
    taken: list[str] = []

    def take_mark(_: object) -> None:
        for mark in folder_store.list("turns/saving/"):
            folder_store.remove(mark.name)
            taken.append(mark.name)

    with pytest.raises(StoreUnavailable, match="held up"):
        await archive.save("w", [str(tree)], on_progress=take_mark)
    assert len(taken) == 1
    assert await archive.list() == []


@pytest.mark.parametrize("prefix", ["archives", "snapshots"])
async def test_nothing_is_collected_when_an_index_cannot_be_read(
    folder_store: Store, tmp_path: Path, prefix: str
) -> None:
    archive = Archive(folder_store, KEY)
    (tmp_path / "tree").mkdir()
    await archive.save("w", [str(tmp_path / "tree")], snapshot=make_snapshot(tmp_path))
    folder_store.put("chunks/ab/abcdef", b"needed by nobody, it seems")
    index = next(path for path in (tmp_path / "store" / prefix).rglob("*") if path.is_file())
    good, before = index.read_bytes(), chunks(folder_store)
    newer = good[:4] + (7).to_bytes(4, "big") + good[8:]
    for data, error in ((good[:-1], ArchiveDamaged), (newer, ArchiveTooNew)):
        index.write_bytes(data)
        with pytest.raises(error, match=index.name):
            await archive.collect()
        assert chunks(folder_store) == before
    index.write_bytes(good)
    assert (await archive.collect()).chunks == 1


async def test_saves_and_collections_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    trees = [make(tmp_path / f"tree{number}", files=20 + number) for number in range(3)]
    rng = random.Random(11)

    def archive() -> Archive:
        return Archive(open_store(str(tmp_path / "store")), KEY)

    async def save_often(number: int) -> None:
        for _ in range(6):
            (trees[number] / "d0" / "f0").write_bytes(rng.randbytes(100))
            await archive().save(f"w{number}", [str(trees[number])])
            for old in (await archive().list(f"w{number}"))[:-1]:
                await archive().delete(f"w{number}", version=old.version)

    async def collect_often(done: asyncio.Event) -> int:
        count = 0
        while not done.is_set():
            try:
                count += (await archive().collect()).chunks
            except Conflict:
                await asyncio.sleep(0.005)
        return count

    done = asyncio.Event()
    collector = asyncio.create_task(collect_often(done))
    await asyncio.gather(*(save_often(number) for number in range(3)))
    done.set()
    await collector
    for number, tree in enumerate(trees):
        await archive().restore(f"w{number}", tmp_path / f"back{number}")
        assert likeness(tmp_path / f"back{number}") == likeness(tree)
