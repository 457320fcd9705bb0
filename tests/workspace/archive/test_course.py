"""Saves and restores tell how far they are, can be stopped, and keep what they hold to themselves."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from tests.crashes.test_full_disk import need_private_mounts
from tests.workspace.archive.conftest import KEY
from tests.workspace.archive.likeness import likeness
from tests.workspace.archive.test_incremental import make

from skep.errors import Conflict
from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import Store
from skep.workspace.archive.watch import Progress

FULL = Path(__file__).with_name("full_disk.py")
MOUNT = 'mount -t tmpfs -o size=8m tmpfs "$1" && shift && exec "$@"'


async def test_progress_is_told_in_the_event_loop_and_ends_with_the_whole(archive: Archive, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=100)
    told: list[tuple[Progress, int]] = []

    def tell(progress: Progress) -> None:
        told.append((progress, threading.get_ident()))

    saved = await archive.save("w", [str(tree)], on_progress=tell)
    assert (told[-1][0].files, told[-1][0].size_bytes) == (saved.files, saved.size_bytes)
    await archive.restore("w", tmp_path / "back", on_progress=tell)
    assert (told[-1][0].files, told[-1][0].size_bytes) == (saved.files, saved.size_bytes)
    assert {thread for _, thread in told} == {threading.get_ident()}


async def cancelled_at_first_progress(
    act: Callable[[Callable[[Progress], None]], Coroutine[None, None, object]],
) -> None:
    def tell(_: Progress) -> None:
        task.cancel()

    task = asyncio.create_task(act(tell))
    with pytest.raises(asyncio.CancelledError):
        await task


def working_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith(("skep-save", "skep-restore"))]


async def test_a_save_that_is_cancelled_leaves_no_archive_and_no_thread(folder_store: Store, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=3000)
    archive = Archive(folder_store, KEY)
    await cancelled_at_first_progress(lambda tell: archive.save("w", [str(tree)], on_progress=tell))
    assert not working_threads()
    assert await archive.list() == []
    assert list(folder_store.list("turns/")) == []
    await archive.save("w", [str(tree)])


async def test_a_restore_that_is_cancelled_leaves_nothing(folder_store: Store, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=3000)
    archive = Archive(folder_store, KEY)
    await archive.save("w", [str(tree)])
    await cancelled_at_first_progress(lambda tell: archive.restore("w", tmp_path / "back", on_progress=tell))
    assert not working_threads()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "tree"]


async def test_of_two_restores_to_one_place_one_is_refused(folder_store: Store, tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", files=300)
    archive = Archive(folder_store, KEY)
    await archive.save("w", [str(tree)])
    outcomes = await asyncio.gather(
        *(archive.restore("w", tmp_path / "back") for _ in range(2)), return_exceptions=True
    )
    assert len([outcome for outcome in outcomes if isinstance(outcome, Conflict)]) == 1
    assert likeness(tmp_path / "back") == likeness(tree)


async def test_no_name_and_no_content_of_a_file_is_in_the_store(store: Store, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "telling-name").write_text("telling content")
    await Archive(store, KEY).save("w", [str(tmp_path / "tree")], meta={"telling": "meta"})
    for prefix in ("chunks/", "archives/"):
        stored = [(one.name.encode(), store.get(one.name)) for one in store.list(prefix)]
        assert stored
        assert not [name for name, data in stored if b"telling" in name + data]


async def test_equal_content_under_another_key_has_another_name(folder_store: Store, tmp_path: Path) -> None:
    """Whoever keeps the store cannot find out whether it holds a file that they know."""
    tree = make(tmp_path / "tree", files=3)
    names = []
    for key in (KEY, bytes(32)):
        archive = Archive(folder_store, key)
        await archive.save(key.hex()[:4], [str(tree)])
        names.append(set((await archive.show(key.hex()[:4])).tree.chunks))
    assert not names[0] & names[1]


@pytest.mark.parametrize("deed", ["save", "restore"])
def test_a_disk_that_is_full_is_a_clear_error_and_nothing_half_is_left(tmp_path: Path, deed: str) -> None:
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    need_private_mounts(tmp_path / "small")
    command = ["unshare", "-Urm", "sh", "-c", MOUNT, "sh", str(tmp_path / "small"), sys.executable, str(FULL)]
    run = subprocess.run(
        [*command, deed, str(tmp_path / "small"), str(tmp_path / "large")], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout)
    assert outcome["error"] == "StorageFull"
    assert "no room left" in outcome["message"]
    assert outcome["left"] == []
    assert outcome["afterwards"] == "as it was"
