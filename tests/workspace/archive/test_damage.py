"""An archive that was cut, altered, swapped or made by somebody hostile is refused, and nothing of it is written."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.workspace.archive.conftest import KEY
from tests.workspace.archive.likeness import likeness

from skep.errors import ArchiveDamaged, ArchiveTooNew, Corrupt
from skep.workspace.archive.archive import Archive
from skep.workspace.archive.catalogue import Catalogue, archive_address
from skep.workspace.archive.chunks import Chunks
from skep.workspace.archive.cipher import Cipher
from skep.workspace.archive.index import Index, Row, Tree, encode_rows
from skep.workspace.archive.key import Key
from skep.workspace.archive.store import Store

VERSION = "00000001-20260101T000000Z-00000000"
TOP = Row("folder", 0, "", 0o755, 0)


@pytest.fixture
async def saved(folder_store: Store, tmp_path: Path) -> Archive:
    """Give an archive of a small tree, twice saved, in the folder `store`."""
    rng = random.Random(3)
    (tmp_path / "tree").mkdir()
    for number in range(4):
        (tmp_path / "tree" / f"file{number}").write_bytes(rng.randbytes(1_200_000))
    archive = Archive(folder_store, KEY)
    await archive.save("w", [str(tmp_path / "tree")])
    (tmp_path / "tree" / "later").write_text("only in the second")
    await archive.save("w", [str(tmp_path / "tree")])
    return archive


def objects(tmp_path: Path, folder: str) -> list[Path]:
    return sorted(path for path in (tmp_path / "store" / folder).rglob("*") if path.is_file())


async def refused(archive: Archive, tmp_path: Path, kind: type[Corrupt] = ArchiveDamaged) -> str:
    """Return why an archive is refused, having seen that nothing of it was written."""
    with pytest.raises(kind) as refusal:
        await archive.restore("w", tmp_path / "back")
    assert not [path.name for path in tmp_path.iterdir() if "back" in path.name]
    assert refusal.value.hint
    return refusal.value.message


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:20],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: flip(data, 0),
        lambda data: flip(data, 9),
        lambda data: flip(data, 20),
        lambda data: flip(data, len(data) // 2),
        lambda data: flip(data, len(data) - 1),
    ],
    ids=["cut", "cut short", "emptied", "longer", "magic", "key id", "nonce", "middle", "tag"],
)
async def test_whatever_is_done_to_any_object_is_noticed_and_the_object_named(
    saved: Archive, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    newest = objects(tmp_path, "archives")[-1]
    for path in [newest, *objects(tmp_path, "chunks")]:
        good = path.read_bytes()
        path.write_bytes(damage(good))
        try:
            index = await saved.show("w") if path != newest else None
            if index is None or path.name in index.tree.chunks + index.tree.rows:
                assert path.name in await refused(saved, tmp_path)
        finally:
            path.write_bytes(good)
    await saved.restore("w", tmp_path / "back")
    assert likeness(tmp_path / "back") == likeness(tmp_path / "tree")


async def test_a_chunk_in_the_place_of_another_is_noticed(saved: Archive, tmp_path: Path) -> None:
    needed = (await saved.show("w")).tree.chunks
    one, other = [path for path in objects(tmp_path, "chunks") if path.name in needed][:2]
    one.write_bytes(other.read_bytes())
    assert one.name in await refused(saved, tmp_path)


async def test_a_chunk_that_is_missing_is_named(saved: Archive, tmp_path: Path) -> None:
    chunk = (await saved.show("w")).tree.chunks[0]
    next(path for path in objects(tmp_path, "chunks") if path.name == chunk).unlink()
    assert f"{chunk} is missing" in await refused(saved, tmp_path)


async def test_the_index_of_another_workspace_is_noticed(saved: Archive, tmp_path: Path) -> None:
    await saved.save("other", [str(tmp_path / "tree")])
    newest = objects(tmp_path, "archives/w")[-1]
    newest.write_bytes(objects(tmp_path, "archives/other")[0].read_bytes())
    assert newest.name in await refused(saved, tmp_path)


async def test_an_older_index_under_a_newer_name_is_noticed(saved: Archive, tmp_path: Path) -> None:
    oldest = objects(tmp_path, "archives/w")[0]
    oldest.with_name("00000009-20990101T000000Z-00000000").write_bytes(oldest.read_bytes())
    assert "in the place of another" in await refused(saved, tmp_path)


async def test_another_key_is_told_from_damage(saved: Archive, folder_store: Store, tmp_path: Path) -> None:
    other = Archive(folder_store, bytes(32))
    assert "another" not in await refused(other, tmp_path)
    message = await refused(other, tmp_path)
    assert "sealed with the key" in message
    assert Key.of(KEY).id.hex() in message


async def test_an_archive_of_a_newer_skep_says_so(saved: Archive, tmp_path: Path) -> None:
    newest = objects(tmp_path, "archives")[-1]
    data = newest.read_bytes()
    newest.write_bytes(data[:4] + (2).to_bytes(4, "big") + data[8:])
    message = await refused(saved, tmp_path, ArchiveTooNew)
    assert "format 2" in message


def forge(store: Store, rows: list[Row], *, chunks: list[bytes] | None = None, again: list[int] | None = None) -> None:
    """Write an archive with the right key and rows that Skep itself would never write."""
    cipher = Cipher(Key.of(KEY))
    kept = Chunks(store, cipher)
    names = [kept.keep(content)[0] for content in chunks or []]
    table, _ = kept.keep(encode_rows(names, rows))
    tree = Tree(rows=[table], chunks=names, named_again=again or [], files=1, size_bytes=1)
    index = Index(name="w", version=VERSION, saved_at=datetime.now(UTC), tree=tree)
    Catalogue(store, cipher).write(archive_address("w", VERSION), index)


def file(name: str, depth: int = 1, **more: object) -> Row:
    return Row("file", depth, name, 0o644, 0, **{"size": 4, "extents": [0, 0, 4], **more})  # type: ignore[arg-type]


HOSTILE = {
    "a name that leads up": [TOP, file("..")],
    "a path that leads up": [TOP, file("../outside")],
    "an absolute name": [TOP, file("/tmp/skep-archive-outside")],
    "a path": [TOP, file("a/b")],
    "no name": [TOP, file("")],
    "the folder itself": [TOP, file(".")],
    "a name with a NUL": [TOP, file("a\0b")],
    "a name of letters that are no bytes": [TOP, file("\u4e2d")],
    "a name that is too long": [TOP, file("x" * 300)],
    "a name twice": [TOP, file("a"), file("a")],
    "a folder twice": [TOP, Row("folder", 1, "a", 0o755, 0), Row("folder", 1, "a", 0o755, 0)],
    "a file through a link": [TOP, Row("link", 1, "a", 0o777, 0, target="/tmp"), file("b", 2)],
    "a folder over a link": [TOP, Row("link", 1, "a", 0o777, 0, target="/tmp"), Row("folder", 1, "a", 0o755, 0)],
    "a file over a link": [TOP, Row("link", 1, "a", 0o777, 0, target="/tmp/x"), file("a")],
    "a file in a file": [TOP, file("a"), file("b", 2)],
    "a file in no folder": [TOP, file("a", 7)],
    "a second top": [TOP, Row("folder", 0, "", 0o755, 0)],
    "no top": [file("a")],
    "a top with a name": [Row("folder", 0, "a", 0o755, 0)],
    "a name of nothing": [TOP, Row("name", 1, "a", 0o644, 0, back=1)],
    "a name of itself": [TOP, Row("name", 1, "a", 0o644, 0, back=0)],
    "a name of what is to come": [TOP, Row("name", 1, "a", 0o644, 0, back=9)],
    "content beyond its chunk": [TOP, file("a", size=9, extents=[0, 0, 9])],
    "content before its chunk": [TOP, file("a", extents=[0, -2, 4])],
    "content of no chunk": [TOP, file("a", extents=[5, 0, 4])],
    "half an extent": [TOP, file("a", extents=[0, 0])],
    "less content than its size": [TOP, file("a", size=100)],
    "a hole of less than nothing": [TOP, file("a", size=0, extents=[0, 0, 4, -1, 0, -4])],
    "a hole larger than any file": [TOP, file("a", size=1 << 63, extents=[-1, 0, 1 << 63])],
    "a size beyond numbers": [TOP, file("a", size=1 << 70, extents=[-1, 0, 1 << 70])],
    "a time beyond all": [TOP, file("a")._replace(mtime_ns=1 << 100)],
    "an attribute of the system": [TOP, file("a", attributes={"trusted.overlay.redirect": "/etc"})],
    "an attribute with no name": [TOP, file("a", attributes={"": ""})],
}


@pytest.mark.parametrize("rows", HOSTILE.values(), ids=HOSTILE)
async def test_rows_that_no_tree_has_are_refused(folder_store: Store, tmp_path: Path, rows: list[Row]) -> None:
    forge(folder_store, rows, chunks=[b"four"])
    await refused(Archive(folder_store, KEY), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


async def test_the_forger_can_write_an_archive_that_is_good(folder_store: Store, tmp_path: Path) -> None:
    """The control: what is refused above is refused for its rows and nothing else."""
    again = Row("name", 1, "b", 0o644, 0, back=1)
    forge(folder_store, [TOP, file("a"), again], chunks=[b"four"], again=[1])
    await Archive(folder_store, KEY).restore("w", tmp_path / "back")
    assert (tmp_path / "back" / "b").read_bytes() == b"four"
    assert (tmp_path / "back" / "a").stat().st_nlink == 2


@pytest.mark.parametrize("name", ["../outside", "{absolute}", "link/outside"])
def test_a_writer_that_trusts_names_leaves_its_folder(tmp_path: Path, name: str) -> None:
    """The control: with names joined to paths, as the hostile rows hope, each of them gets out."""
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "link").symlink_to("..")
    (tmp_path / "back" / name.format(absolute=tmp_path / "outside")).write_text("got out")
    assert (tmp_path / "outside").read_text() == "got out"


async def test_a_chunk_whose_content_is_not_what_its_name_says_is_noticed(folder_store: Store, tmp_path: Path) -> None:
    forge(folder_store, [TOP, file("a")], chunks=[b"four"])
    [name] = (await Archive(folder_store, KEY).show("w")).tree.chunks
    address = f"chunks/{name[:2]}/{name}"
    folder_store.put(address, Cipher(Key.of(KEY)).seal(b"evil", address))
    assert "does not hold what its name says" in await refused(Archive(folder_store, KEY), tmp_path)


async def test_an_index_of_nonsense_is_damage(folder_store: Store, tmp_path: Path) -> None:
    address = archive_address("w", VERSION)
    for nonsense in (b"", b"[]", b"{", b'{"v": 1}', b"\xff\xfe", os.urandom(100)):
        folder_store.put(address, Cipher(Key.of(KEY)).seal(nonsense, address))
        assert VERSION in await refused(Archive(folder_store, KEY), tmp_path)
