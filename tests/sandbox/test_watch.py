"""Following changes below a folder, without a sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from skep.sandbox.files import Change
from skep.sandbox.watch import Watch


def _watch(folder: Path, until: asyncio.Event | None = None) -> Watch:
    return Watch(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), until=until)


async def _until(changes: AsyncIterator[Change], last: Change) -> list[Change]:
    seen = []
    async with asyncio.timeout(10):
        async for change in changes:
            seen.append(change)
            if change == last:
                break
    return seen


async def test_what_was_there_before_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    async with _watch(tmp_path) as watch:
        (tmp_path / "new").touch()
        assert await _until(aiter(watch), Change("created", "new")) == [Change("created", "new")]


async def test_folders_that_were_there_are_watched(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    async with _watch(tmp_path) as watch:
        (tmp_path / "a" / "b" / "file").touch()
        await _until(aiter(watch), Change("created", "a/b/file"))


async def test_a_tree_moved_in_is_told_with_all_that_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "watched").mkdir()
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "outside" / "deep" / "file").touch()
    async with _watch(tmp_path / "watched") as watch:
        (tmp_path / "outside").rename(tmp_path / "watched" / "inside")
        seen = await _until(aiter(watch), Change("created", "inside/deep/file"))
        assert seen[0] == Change("created", "inside")


async def test_a_renamed_folder_is_known_by_its_new_name(tmp_path: Path) -> None:
    (tmp_path / "old" / "deep").mkdir(parents=True)
    async with _watch(tmp_path) as watch:
        changes = aiter(watch)
        (tmp_path / "old").rename(tmp_path / "new")
        await _until(changes, Change("created", "new"))
        (tmp_path / "new" / "deep" / "file").touch()
        await _until(changes, Change("created", "new/deep/file"))


async def test_a_link_to_a_folder_is_not_gone_into(tmp_path: Path) -> None:
    (tmp_path / "watched").mkdir()
    (tmp_path / "outside").mkdir()
    async with _watch(tmp_path / "watched") as watch:
        changes = aiter(watch)
        (tmp_path / "watched" / "link").symlink_to(tmp_path / "outside")
        await _until(changes, Change("created", "link"))
        (tmp_path / "outside" / "secret").touch()
        (tmp_path / "watched" / "end").touch()
        seen = await _until(changes, Change("created", "end"))
        assert not any("secret" in change.path for change in seen)


async def test_it_ends_when_it_is_told_to(tmp_path: Path) -> None:
    end = asyncio.Event()
    async with _watch(tmp_path, end) as watch:
        waiting = asyncio.ensure_future(anext(aiter(watch), None))
        await asyncio.sleep(0)
        end.set()
        assert await asyncio.wait_for(waiting, 2) is None


async def test_names_that_are_no_text_are_told_as_python_tells_them(tmp_path: Path) -> None:
    async with _watch(tmp_path) as watch:
        name = os.fsdecode(b"\xff\xfe")
        (tmp_path / name).touch()
        await _until(aiter(watch), Change("created", name))


async def test_leaving_closes_everything(tmp_path: Path) -> None:
    before = _descriptors()
    async with _watch(tmp_path):
        assert _descriptors() != before
    assert _descriptors() == before


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}
