"""What comes out of an archive is what went in."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from tests.workspace.archive.conftest import KEY
from tests.workspace.archive.likeness import likeness
from tests.workspace.kernel_view import kernel_view
from tests.workspace.test_overlay import Node, make_all, stacks

from skep.errors import Conflict, InvalidRequest, NotFound, WorkspaceDamaged
from skep.sandbox.erase import erase
from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import Store, open_store

MIB = 1 << 20


@dataclass(frozen=True)
class Snapshot:
    """As much of a snapshot as an archive needs."""

    folder: Path
    template: str = "minimal"
    version: str = "v0001-abc"
    hash: str = "abc123"

    @property
    def tree(self) -> Path:
        return self.folder / "tree"


@contextmanager
def scene() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="skep-archive-"))
    try:
        yield path
    finally:
        erase(str(path), path.stat().st_ino)


def make_snapshot(folder: Path) -> Snapshot:
    (folder / "snapshot" / "tree" / "lib").mkdir(parents=True)
    (folder / "snapshot" / "tree" / "lib" / "code").write_text("import this")
    (folder / "snapshot" / "tree" / "shadowed").write_text("below")
    (folder / "snapshot" / "snapshot.json").write_text('{"python": "3.11"}')
    return Snapshot(folder / "snapshot")


def make_everything(top: Path) -> Path:
    """Make a tree that has one of everything."""
    rng = random.Random(5)
    top.mkdir()
    (top / "empty").mkdir(mode=0o700)
    (top / "a" / "b" / "c").mkdir(parents=True)
    for number in range(300):
        (top / "a" / f"small{number}").write_bytes(rng.randbytes(rng.randrange(20000)))
    (top / "a" / "nothing").touch()
    (top / "a" / "large").write_bytes(rng.randbytes(9 * MIB + 17))
    (top / "a" / "exact").write_bytes(b"x" * 4 * MIB)
    (top / "a" / "program").write_text("#!/bin/sh\n")
    (top / "a" / "program").chmod(0o755)
    (top / "a" / "b" / "again").hardlink_to(top / "a" / "program")
    (top / "again").hardlink_to(top / "a" / "program")
    (top / os.fsdecode(b"\xff\xfe bytes \n")).write_text("any name")
    (top / "ünï").write_text("any letters")
    (top / "relative").symlink_to("a/program")
    (top / "absolute").symlink_to("/etc/passwd")
    (top / "dangling").symlink_to(os.fsdecode(b"\xff nowhere"))
    os.mkfifo(top / "pipe", 0o640)
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(top, os.O_PATH)
        listener.bind(f"/proc/self/fd/{folder}/socket")
        os.close(folder)
    os.setxattr(top / "a", "user.note", bytes(range(256)))
    os.setxattr(top / "a" / "program", "user.overlay.overlay.opaque", b"the agent's own")
    os.setxattr(top, "user.top", b"of the top")
    with (top / "sparse").open("wb") as sparse:
        sparse.seek(3 * MIB)
        sparse.write(b"in the middle")
        sparse.truncate(64 * MIB)
    with (top / "hollow").open("wb") as hollow:
        hollow.truncate(2 * MIB)
    (top / "a" / "secret").write_text("not even its owner")
    (top / "a" / "secret").chmod(0)
    (top / "a" / "shut").mkdir()
    (top / "a" / "shut" / "inside").write_text("behind a shut door")
    (top / "a" / "shut").chmod(0)
    for number, path in enumerate([top / "a" / "program", top / "a" / "b", top / "relative", top]):
        os.utime(path, ns=(1, 1_000_000_007 * (number + 1)), follow_symlinks=False)
    return top


async def test_every_thing_comes_back_as_it_was(archive: Archive, tmp_path: Path) -> None:
    tree = make_everything(tmp_path / "tree")
    before = likeness(tree)
    saved = await archive.save("w", [str(tree)], meta={"packages": ["numpy"]})
    restored = await archive.restore("w", tmp_path / "back")
    assert likeness(tmp_path / "back") == before == likeness(tree)
    assert (restored.files, restored.size_bytes, restored.meta) == (
        saved.files,
        saved.size_bytes,
        {"packages": ["numpy"]},
    )
    assert saved.left_out == 0
    assert sorted(path.name for path in tmp_path.iterdir() if "restor" in path.name) == []


async def test_sparse_files_stay_sparse(archive: Archive, tmp_path: Path) -> None:
    tree = make_everything(tmp_path / "tree")
    await archive.save("w", [str(tree)])
    await archive.restore("w", tmp_path / "back")
    assert (tmp_path / "back" / "sparse").stat().st_blocks * 512 < MIB
    assert (tmp_path / "back" / "hollow").stat().st_blocks == 0


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stacks, stacks)
def test_layers_come_back_as_one_that_shows_the_same_over_the_snapshot(
    layers: list[dict[str, Node]], below: list[dict[str, Node]]
) -> None:
    with scene() as folder:
        stack, under = make_all(folder, layers), make_all(folder, below[:1], "b")[0]
        snapshot = Snapshot(folder / "snapshot")
        snapshot.folder.mkdir()
        Path(under).rename(snapshot.tree)
        archive = Archive(open_store(str(folder / "store")), KEY)
        asyncio.run(archive.save("w", stack, snapshot=snapshot))
        asyncio.run(archive.restore("w", folder / "back"))
        expected = kernel_view(folder, [*stack, str(snapshot.tree)])
        assert kernel_view(folder, [str(folder / "back"), str(snapshot.tree)]) == expected


async def test_a_workspace_comes_back_on_a_machine_that_has_nothing_but_the_store_and_the_key(
    store: Store, tmp_path: Path
) -> None:
    snapshot = make_snapshot(tmp_path)
    tree = make_everything(tmp_path / "tree")
    (tree / "lib").mkdir()
    os.mknod(tree / "lib" / "code", stat.S_IFCHR, 0)
    await Archive(store, KEY).save("w", [str(tree)], snapshot=snapshot)
    there, elsewhere = Archive(store, KEY), tmp_path / "elsewhere"
    elsewhere.mkdir()
    restored = await there.restore("w", elsewhere / "upper")
    assert restored.snapshot is not None
    name, record = await there.restore_snapshot(restored.snapshot.hash, elsewhere / "lower")
    assert (name.template, name.version, record) == ("minimal", "v0001-abc", '{"python": "3.11"}')
    assert likeness(elsewhere / "lower") == likeness(snapshot.tree)
    view = kernel_view(tmp_path, [str(elsewhere / "upper"), str(elsewhere / "lower")])
    assert "lib/code" not in view
    assert view["shadowed"][0] == "file"


async def test_a_tree_deeper_than_any_path_comes_back(folder_store: Store, tmp_path: Path) -> None:
    depth = 2500
    top = tmp_path / "tree"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("end", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    archive = Archive(folder_store, KEY)
    try:
        await archive.save("w", [str(top)])
        await archive.restore("w", tmp_path / "back")
        assert likeness(tmp_path / "back").keys() == likeness(top).keys()
    finally:
        erase(str(top), top.stat().st_ino)
        erase(str(tmp_path / "back"), (tmp_path / "back").stat().st_ino)


async def test_a_tree_whose_top_is_shut_comes_back(folder_store: Store, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("inside")
    os.setxattr(tree, "user.note", b"1")
    tree.chmod(0)
    archive = Archive(folder_store, KEY)
    await archive.save("w", [str(tree)])
    await archive.restore("w", tmp_path / "back")
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("tree", "back")] == [0, 0]
    (tmp_path / "back").chmod(0o700)
    assert (tmp_path / "back" / "file").read_text() == "inside"
    assert os.getxattr(tmp_path / "back", "user.note") == b"1"


async def test_bits_that_lend_rights_do_not_come_back(folder_store: Store, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "program").touch()
    (tmp_path / "tree" / "program").chmod(0o6755)
    archive = Archive(folder_store, KEY)
    await archive.save("w", [str(tmp_path / "tree")])
    await archive.restore("w", tmp_path / "back")
    assert stat.S_IMODE((tmp_path / "back" / "program").stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
async def test_files_come_back_as_the_owner_that_is_named(folder_store: Store, tmp_path: Path) -> None:
    tree = make_everything(tmp_path / "tree")
    snapshot = make_snapshot(tmp_path)
    os.mknod(tree / "shadowed", stat.S_IFCHR, 0)
    archive = Archive(folder_store, KEY)
    await archive.save("w", [str(tree)], snapshot=snapshot)
    await archive.restore("w", tmp_path / "back", owner=(61111, 61112))
    assert stat.S_ISCHR((tmp_path / "back" / "shadowed").lstat().st_mode)
    paths = [tmp_path / "back", *(tmp_path / "back").rglob("*")]
    assert {(path.lstat().st_uid, path.lstat().st_gid) for path in paths} == {(61111, 61112)}


async def test_any_version_can_be_restored_and_the_newest_is_the_default(archive: Archive, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    versions = []
    for text in ("first", "second", "third"):
        (tmp_path / "tree" / "file").write_text(text)
        versions.append((await archive.save("slack:C1:1700.1", [str(tmp_path / "tree")])).version)
    assert [listed.version for listed in await archive.list("slack:C1:1700.1")] == versions
    assert {listed.name for listed in await archive.list()} == {"slack:C1:1700.1"}
    await archive.restore("slack:C1:1700.1", tmp_path / "newest")
    await archive.restore("slack:C1:1700.1", tmp_path / "oldest", version=versions[0])
    assert (tmp_path / "newest" / "file").read_text() == "third"
    assert (tmp_path / "oldest" / "file").read_text() == "first"


@pytest.mark.parametrize("name", ["..", ".", "../../x", "a/b", "%2e%2e", "a b", "ü", "x" * 60])
async def test_any_name_stays_in_its_place(folder_store: Store, tmp_path: Path, name: str) -> None:
    (tmp_path / "tree").mkdir()
    archive = Archive(folder_store, KEY)
    await archive.save(name, [str(tmp_path / "tree")])
    assert [listed.name for listed in await archive.list()] == [name]
    assert len(await archive.list(name)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"store", "tree"}
    assert {path.name for path in (tmp_path / "store").iterdir()} <= {"archives", "chunks", "drafts", "turns"}


@pytest.mark.parametrize("name", ["", "x" * 300, "\udcff"])
async def test_a_name_that_no_store_can_have_is_refused(folder_store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        await Archive(folder_store, KEY).save(name, [str(tmp_path)])


async def test_nothing_is_restored_over_something_else(folder_store: Store, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    archive = Archive(folder_store, KEY)
    await archive.save("w", [str(tmp_path / "tree")])
    (tmp_path / "link").symlink_to("nowhere")
    for taken in ("tree", "link"):
        with pytest.raises(Conflict, match="already"):
            await archive.restore("w", tmp_path / taken)
    assert (tmp_path / "link").is_symlink()


async def test_what_is_not_there_is_not_found(archive: Archive, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no archive of 'w'"):
        await archive.restore("w", tmp_path / "back")
    with pytest.raises(NotFound):
        await archive.restore("w", tmp_path / "back", version="00000001-20260101T000000Z-00000000")
    with pytest.raises(InvalidRequest, match="no version"):
        await archive.restore("w", tmp_path / "back", version="../../x")
    with pytest.raises(NotFound):
        await archive.restore_snapshot("none", tmp_path / "back")
    with pytest.raises(WorkspaceDamaged, match="missing"):
        await archive.save("w", [str(tmp_path / "no such layer")])
    assert await archive.list() == []
