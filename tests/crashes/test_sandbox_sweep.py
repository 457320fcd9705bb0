"""The sweep removes what dead controllers left, known by identity, and nothing else."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import pytest

from skep.sandbox.cgroups import Group, Place
from skep.sandbox.erase import erase
from skep.sandbox.leftovers import Record, records_folder, sweep
from skep.sandbox.sandbox import Sandbox


class Orphan:
    """A record whose controller is gone, with whatever text a test wants in it."""

    def __init__(self, text: str) -> None:
        self.id = f"test-{secrets.token_hex(8)}"
        self.path = records_folder() / f"{self.id}.json"
        self.path.write_text(text)

    def __enter__(self) -> Orphan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.path.unlink(missing_ok=True)


def listing(throwaway: tuple[Path, int] | None = None, groups: dict[str, tuple[str, int]] | None = None) -> str:
    folder = [str(throwaway[0]), throwaway[1]] if throwaway else None
    return json.dumps({"way": "v1" if groups else "none", "groups": groups or {}, "throwaway": folder}).ljust(2048)


@pytest.fixture
def group() -> Iterator[Group]:
    """Give a control group of this test's own."""
    if Place.find().way == "none":
        pytest.skip("this user may not make control groups here")
    made = Group.make()
    yield made
    made.remove()


def test_the_very_folder_that_was_listed_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    (folder / "kept" / "deep").mkdir(parents=True)
    (folder / "file").write_text("text")
    with Orphan(listing((folder, folder.stat().st_ino))) as orphan:
        assert orphan.id in sweep()
        assert not folder.exists()
        assert not orphan.path.exists()


def test_a_folder_made_again_under_the_same_name_is_left_alone(tmp_path: Path) -> None:
    """The path is the same, the folder is another: whoever made it keeps it."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    inode = folder.stat().st_ino
    folder.rename(tmp_path / "elsewhere")  # its inode stays taken, so the new folder gets another
    folder.mkdir()
    (folder / "precious").write_text("text")
    with Orphan(listing((folder, inode))) as orphan:
        assert orphan.id in sweep()
    assert (folder / "precious").read_text() == "text"


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    """Even if it leads to the very inode that was listed."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("text")
    link = tmp_path / "workspace"
    link.symlink_to(target)
    with Orphan(listing((link, target.stat().st_ino))) as orphan:
        assert orphan.id in sweep()
    assert (target / "precious").read_text() == "text"


def test_a_folder_that_was_only_planned_is_removed_only_if_it_is_empty(tmp_path: Path) -> None:
    """Its inode is not known yet, so nothing that could be somebody's is touched."""
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    (full / "precious").write_text("text")
    with Orphan(listing((empty, 0))), Orphan(listing((full, 0))):
        sweep()
    assert not empty.exists()
    assert (full / "precious").read_text() == "text"


def test_a_control_group_made_again_under_the_same_name_is_left_alone(group: Group) -> None:
    strangers = {controller: (folder, inode + 1) for controller, (folder, inode) in group.folders.items()}
    with Orphan(listing(groups=strangers)) as orphan:
        assert orphan.id in sweep()
    assert all(Path(folder).is_dir() for folder, _ in group.folders.values())


def test_the_very_control_group_that_was_listed_is_removed(group: Group) -> None:
    with Orphan(listing(groups=dict(group.folders))) as orphan:
        assert orphan.id in sweep()
    assert not any(Path(folder).exists() for folder, _ in group.folders.values())


@pytest.mark.parametrize("cut", ["{", '{"way": "v1", "groups": {"memory": ["/sys', "[]", "null", '"v1"', "\0" * 2048])
def test_a_half_written_record_is_left_alone_and_stops_nothing(cut: str, tmp_path: Path) -> None:
    """What it meant is not known for certain; the records after it are swept all the same."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    with Orphan(cut) as half, Orphan(listing((folder, folder.stat().st_ino))) as whole:
        swept = sweep()
        assert half.id not in swept
        assert half.path.read_text() == cut
        assert whole.id in swept
    assert not folder.exists()


def test_a_record_that_lists_nothing_yet_is_removed() -> None:
    """Its controller died before it had made anything."""
    with Orphan("") as orphan:
        assert orphan.id in sweep()
        assert not orphan.path.exists()


async def test_a_live_controllers_sandbox_is_left_alone() -> None:
    """Sweeping again and again, from the same process too, disturbs no sandbox that has a controller."""
    async with Sandbox.create() as sandbox:
        await sandbox.files.write("kept", b"text")
        for _ in range(5):
            assert sandbox.id not in sweep()
        assert (await sandbox.run("cat kept")).text == "text"
        assert (records_folder() / f"{sandbox.id}.json").exists()
    assert not (records_folder() / f"{sandbox.id}.json").exists()


def test_a_record_swept_while_it_is_being_made_is_made_again() -> None:
    """Between making a record and locking it a sweep may take it for a dead one; its maker never goes on without."""
    done = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(sweep_until, done)
        try:
            for _ in range(500):
                record = Record.open(f"test-{secrets.token_hex(8)}")
                assert record.path.stat().st_ino == os.fstat(record.fd).st_ino
                record.path.unlink()
                record.close()
        finally:
            done.set()


def sweep_until(done: threading.Event) -> None:
    while not done.is_set():
        sweep()


def test_any_tree_can_be_erased(tmp_path: Path) -> None:
    """Folders that may not be entered, links, and a depth that no recursion and no path reaches."""
    folder = tmp_path / "tree"
    (folder / "closed" / "inner").mkdir(parents=True)
    (folder / "closed" / "inner" / "file").write_text("text")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("text")
    (folder / "closed" / "link").symlink_to(outside)
    (folder / "closed" / "inner").chmod(0)
    (folder / "closed").chmod(0o500)
    make_deep(folder, 3000)
    erase(str(folder), folder.stat().st_ino)
    assert not folder.exists()
    assert (outside / "precious").read_text() == "text"


def make_deep(folder: Path, levels: int) -> None:
    at = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def test_erasing_what_is_gone_is_no_error(tmp_path: Path) -> None:
    erase(str(tmp_path / "nothing"), 1)
