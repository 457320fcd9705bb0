"""Archives are unpacked whole or not at all."""

from __future__ import annotations

import gzip
import io
import lzma
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.sessions.packed import (
    KINDS,
    PACKERS,
    crowded,
    entry,
    lying,
    packed,
    tarred,
    tarred_as,
    xz_with_dictionary,
    zipped,
    zipped_as,
)

from skep.errors import Conflict
from skep.sandbox.tree import Tree
from skep.sessions.member import Meter
from skep.sessions.packing import PACKINGS
from skep.sessions.sniff import media_type
from skep.sessions.tars import read_tar
from skep.sessions.unpacking import NotUnpacked, Room, Unpacked, is_archive, unpack
from skep.sessions.zips import read_zip

CONTENT = {"a.txt": b"first", "deep/er/b.bin": bytes(range(256)) * 9000, "ünï cöde.md": b"", "deep/c": b"c"}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / "workspace"


@pytest.fixture
def files(workspace: Path) -> Iterator[Tree]:
    tree = Tree.at(str(workspace))
    yield tree
    tree.close()


def found(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def unpacked(files: Tree, data: bytes, room: Room | None = None) -> Unpacked:
    return await unpack(files, io.BytesIO(data), "in/here", room=room or Room())


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_packed_comes_out(kind: str, files: Tree, workspace: Path) -> None:
    result = await unpacked(files, packed(kind, CONTENT))
    assert found(workspace / "in/here") == CONTENT
    assert result == Unpacked("in/here", files=4, size=sum(map(len, CONTENT.values())))
    assert [path.name for path in (workspace / "in").iterdir()] == ["here"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
async def test_every_way_to_write_long_names_is_read(form: int, files: Tree, workspace: Path) -> None:
    content = {"x" * 60 + "/" + "y" * 90 + "/z": b"far"}
    if form != tarfile.USTAR_FORMAT:
        content["n" * 180] = b"long"
    await unpacked(files, tarred(content, form))
    assert found(workspace / "in/here") == content


@pytest.mark.parametrize("kind", [".zip", ".tar"])
async def test_empty_folders_are_made(kind: str, files: Tree, workspace: Path) -> None:
    await unpacked(files, packed(kind, {"empty/": b"", "file": b"1"}))
    assert (workspace / "in/here/empty").is_dir()


@pytest.mark.parametrize("data", [zipped_as("run", b"#!/bin/sh", stat.S_IFREG | 0o6755),
                                  tarred_as(entry("run", mode=0o6755), content=b"#!/bin/sh")],
                         ids=["zip", "tar"])  # fmt: skip
async def test_programs_stay_so_and_get_no_other_right(data: bytes, files: Tree, workspace: Path) -> None:
    await unpacked(files, data)
    assert stat.S_IMODE((workspace / "in/here/run").stat().st_mode) == 0o755


async def test_an_archive_in_an_archive_is_left_packed(files: Tree, workspace: Path) -> None:
    inner = zipped({"secret": b"1"})
    await unpacked(files, tarred({"inner.zip": inner}))
    assert found(workspace / "in/here") == {"inner.zip": inner}


async def test_packed_streams_one_after_the_other_are_one(files: Tree, workspace: Path) -> None:
    data = tarred(CONTENT)
    await unpacked(files, gzip.compress(data[:700]) + gzip.compress(data[700:]))
    assert found(workspace / "in/here") == CONTENT


async def test_an_archive_made_for_streaming_is_read(files: Tree, workspace: Path) -> None:
    buffer = _Unseekable()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in CONTENT.items():
            with archive.open(name, "w", force_zip64=True) as file:
                file.write(data)
    await unpacked(files, buffer.getvalue())
    assert found(workspace / "in/here") == CONTENT


class _Unseekable(io.BytesIO):
    """A file that can only be written on, which makes `zipfile` put sizes behind the files."""

    def tell(self) -> int:
        raise io.UnsupportedOperation


async def test_a_folder_that_is_there_is_not_written_into(files: Tree, workspace: Path) -> None:
    await files.write("in/here/mine", b"kept")
    with pytest.raises(Conflict):
        await unpacked(files, zipped({"mine": b"other"}))
    assert found(workspace / "in") == {"here/mine": b"kept"}


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (zipped(CONTENT), True),
        (tarred(CONTENT), True),
        (gzip.compress(tarred(CONTENT)), True),
        (gzip.compress(b"a text, packed alone"), False),
        (lzma.compress(b""), False),
        (b"plain", False),
        (b"", False),
        (zipped({"[Content_Types].xml": b"<Types/>", "word/document.xml": b"<w/>"}), False),
    ],
    ids=["zip", "tar", "tar.gz", "gz of a text", "xz of nothing", "text", "nothing", "document"],
)
async def test_archives_are_told_by_their_content(data: bytes, answer: bool) -> None:
    assert await is_archive(io.BytesIO(data)) is answer


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cut_archive_leaves_nothing(kind: str, files: Tree, workspace: Path) -> None:
    whole = packed(kind, CONTENT)
    for end in (len(whole) // 4, len(whole) // 2, len(whole) - len(whole) // 8):
        with pytest.raises(NotUnpacked):
            await unpacked(files, whole[:end])
    assert not (workspace / "in").exists()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_archive_past_a_bound_leaves_nothing(kind: str, files: Tree, workspace: Path) -> None:
    with pytest.raises(NotUnpacked, match="entries"):
        await unpacked(files, packed(kind, {f"{number}": b"" for number in range(12)}), Room(entries=11))
    with pytest.raises(NotUnpacked, match="more than"):
        await unpacked(files, packed(kind, CONTENT), Room(unpacked_bytes=2_000_000))
    with pytest.raises(NotUnpacked, match="-fold"):
        await unpacked(files, packed(".zip", {"z": bytes(4_000_000)}), Room(slack_bytes=1000, ratio=50))
    with pytest.raises(NotUnpacked, match="longer"):
        await unpacked(files, packed(kind, CONTENT), Room(seconds=-1))
    assert not (workspace / "in").exists()


async def test_folders_that_are_only_part_of_a_path_are_counted(files: Tree) -> None:
    with pytest.raises(NotUnpacked, match="entries"):
        await unpacked(files, zipped({"a/b/c/d/e": b"", "f/g/h/i/j": b""}), Room(entries=9))
    await unpacked(files, zipped({"a/b/c/d/e": b"", "f/g/h/i/j": b""}), Room(entries=10))


class Counting(io.BytesIO):
    """A file that knows how much of it was read."""

    count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


async def test_a_million_entries_are_refused_after_the_first_too_many(files: Tree) -> None:
    data = Counting(crowded(1_000_000))
    with pytest.raises(NotUnpacked, match="more than 10000 entries"):
        await unpack(files, data, "in/here", room=Room())
    assert data.count < 2_000_000 < len(data.getvalue()) // 20


async def test_a_size_that_is_not_true_is_found_out(files: Tree) -> None:
    for told in (5, 999, 1001, 2**32 - 2):
        with pytest.raises(NotUnpacked, match="not what the list says"):
            await unpacked(files, lying(b"x" * 1000, told))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
async def test_packings_that_cannot_be_bounded_are_left_packed(method: int, files: Tree) -> None:
    with pytest.raises(NotUnpacked, match="method"):
        await unpacked(files, zipped({"a": b"1"}, method))


def test_a_dictionary_larger_than_is_needed_is_refused() -> None:
    def names(size_code: int) -> list[str]:
        data = io.BytesIO(xz_with_dictionary(tarred({"a": b"1"}), size_code))
        return [member.name for member in read_tar(data, "xz", Meter(Room(), packed_bytes=0))]

    assert names(22) == ["a"]  # 8 MiB, as `xz -6` has it
    with pytest.raises(NotUnpacked, match="Memory usage limit"):
        names(40)  # 4 GiB


@settings(max_examples=150, deadline=None)
@given(some.sampled_from(KINDS), some.data())
def test_no_damage_is_anything_but_a_refusal_or_harmless(kind: str, data: some.DataObject) -> None:
    """Flip some bytes: either the archive is refused, or every entry can be read to its end within the bounds."""
    whole = bytearray(packed(kind, {"a": b"some text " * 20, "b/c": b"more"}))
    for _ in range(data.draw(some.integers(1, 6))):
        whole[data.draw(some.integers(0, len(whole) - 1))] = data.draw(some.integers(0, 255))
    file, meter = io.BytesIO(bytes(whole)), Meter(Room(), len(whole))
    packing = PACKINGS.get(media_type(bytes(whole)), "plain")
    try:
        members = read_zip(file, meter) if kind == ".zip" else read_tar(file, packing, meter)
        read = sum(len(piece) for member in members for piece in member.pieces)
    except NotUnpacked:
        return
    assert read <= Room().unpacked_bytes


def test_every_packer_of_the_tests_is_known() -> None:
    assert {media_type(pack(tarred(CONTENT))) for pack in PACKERS.values()} == set(PACKINGS)
