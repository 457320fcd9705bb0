"""After kill -9 in the middle of a save, a restore or a collection, every archive is whole or not there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.crashes.archive_controller import KEY
from tests.programs import started
from tests.workspace.archive.likeness import likeness

from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import open_store
from skep.workspace.archive.turns import STALE_S

PROGRAM = Path(__file__).with_name("archive_controller.py")
DEADLINE_S = 60
SPARE = 5000
#: How much of the work is done when the kill comes; the last ones may find it finished.
MOMENTS = [0.0, 0.1, 0.5, 0.9, 1.0]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    rng = random.Random(1)
    top = tmp_path / "tree"
    for number in range(200):
        (top / f"d{number % 7}").mkdir(parents=True, exist_ok=True)
        (top / f"d{number % 7}" / f"f{number}").write_bytes(rng.randbytes(30_000))
    (top / "large").write_bytes(rng.randbytes(9_000_000))
    (top / "linked").hardlink_to(top / "large")
    return top


def open_archive(tmp_path: Path) -> Archive:
    return Archive(open_store(str(tmp_path / "store")), KEY, memory=tmp_path / "memory")


def killed_in(deed: str, tmp_path: Path, *, when: Callable[[], bool]) -> bool:
    """Do something in another process and kill it at a moment; say whether it was still at it."""
    command = [sys.executable, str(PROGRAM), deed, *(str(tmp_path / name) for name in ("store", "tree", "back"))]
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        deadline = time.monotonic() + DEADLINE_S
        while not when() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        return process.wait() == -signal.SIGKILL


def files_below(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def let_marks_die(tmp_path: Path) -> None:
    """Let the time go by after which a mark that nobody renews counts for nothing."""
    for mark in (tmp_path / "store" / "turns").rglob("*"):
        if mark.is_file():
            os.utime(mark, (mark.stat().st_mtime - STALE_S - 10,) * 2)


async def test_a_save_that_was_killed_left_nothing_or_an_archive_and_the_next_goes_on_where_it_was(
    tmp_path: Path, tree: Path
) -> None:
    whole = await Archive(open_store(str(tmp_path / "measure")), KEY).save("w", [str(tree)])
    total = files_below(tmp_path / "measure")
    killed = 0
    for moment in MOMENTS:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        killed += killed_in("save", tmp_path, when=lambda: files_below(tmp_path / "store") >= total * moment)  # noqa: B023
        archive = open_archive(tmp_path)
        if versions := await archive.list():
            await archive.restore("w", tmp_path / "first", version=versions[0].version)
            assert likeness(tmp_path / "first") == likeness(tree)
            shutil.rmtree(tmp_path / "first")
        there = sum(stored.size for stored in open_store(str(tmp_path / "store")).list("chunks/"))
        again = await archive.save("w", [str(tree)])
        assert again.stored_bytes + there <= whole.stored_bytes * 1.02
        await archive.restore("w", tmp_path / "back")
        assert likeness(tmp_path / "back") == likeness(tree)
        shutil.rmtree(tmp_path / "back")
        let_marks_die(tmp_path)
        await archive.delete("w")
        await archive.collect()
        store = tmp_path / "store"
        assert [path.name for path in store.rglob("*") if path.is_file() and "drafts" not in path.parts] == []
    assert killed >= len(MOMENTS) // 2


async def test_a_restore_that_was_killed_left_no_tree_or_all_of_it_and_the_next_starts_over(
    tmp_path: Path, tree: Path
) -> None:
    archive = open_archive(tmp_path)
    await archive.save("w", [str(tree)])
    total = files_below(tree)
    killed = 0
    for moment in MOMENTS:
        draft = tmp_path / ".back.restoring"
        killed += killed_in("restore", tmp_path, when=lambda: files_below(draft) >= total * moment)  # noqa: B023
        if (tmp_path / "back").exists():
            assert likeness(tmp_path / "back") == likeness(tree)
            shutil.rmtree(tmp_path / "back")
        await archive.restore("w", tmp_path / "back")
        assert likeness(tmp_path / "back") == likeness(tree)
        assert [path.name for path in tmp_path.iterdir() if "restoring" in path.name] == []
        shutil.rmtree(tmp_path / "back")
    assert killed >= len(MOMENTS) // 2


async def test_a_collection_that_was_killed_took_nothing_that_is_needed(tmp_path: Path, tree: Path) -> None:
    archive = open_archive(tmp_path)
    await archive.save("w", [str(tree)])
    chunks = tmp_path / "store" / "chunks"
    needed = files_below(chunks)
    killed = 0
    for moment in (0.9, 0.5, 0.1):
        (chunks / "spare").mkdir(exist_ok=True)
        for number in range(SPARE):
            (chunks / "spare" / f"{number:064x}").touch()
        killed += killed_in("collect", tmp_path, when=lambda: files_below(chunks) <= needed + SPARE * moment)  # noqa: B023
        await archive.restore("w", tmp_path / "back")
        assert likeness(tmp_path / "back") == likeness(tree)
        shutil.rmtree(tmp_path / "back")
        let_marks_die(tmp_path)
        await archive.collect()
        assert files_below(chunks) == needed
    assert killed
