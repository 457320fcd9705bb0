"""What a file or an archive that somebody sends can do to the host and to the workspace it goes to.

Every archive is first unpacked by something that trusts it, where it has to do its harm.
"""

from __future__ import annotations

import bz2
import contextlib
import io
import os
import re
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.attacks.attack import IS_ROOT, SECRET
from tests.sessions.packed import (
    PACKERS,
    deflated,
    ended,
    entry,
    listed,
    local,
    lying,
    overlapping,
    tarred,
    tarred_as,
    zipped,
    zipped_as,
)

from skep.errors import SkepError
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.tree import Tree
from skep.sessions.attachments import Sent, receive
from skep.sessions.member import Meter, NotUnpacked, Room
from skep.sessions.packing import PACKINGS, PIECE
from skep.sessions.sniff import media_type
from skep.sessions.tars import read_tar
from skep.sessions.zips import read_zip

PLANTED = b"planted"


@pytest.fixture
def folder(outside: Path) -> Path:
    return outside / "workspace"


def trusting_tar(data: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="fully_trusted")


def trusting_zip(data: bytes, folder: Path) -> None:
    """Unpack as programs do that take names, modes and sizes as they are written."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            target = Path(folder, info.filename.replace("\\", "/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISLNK(info.external_attr >> 16):
                target.symlink_to(archive.read(info).decode())
            else:
                target.write_bytes(archive.read(info))


@dataclass(frozen=True, slots=True)
class Escape:
    """An archive that reaches out of the folder it is unpacked in, three levels below `outside`."""

    name: str
    made: Callable[[Path], bytes]
    trusting: Callable[[bytes, Path], None]
    reached: Callable[[Path, Path], bool]
    reason: str


def planted(_: Path, outside: Path) -> bool:
    return (outside / "planted").exists()


def reads_secret(control: Path, _: Path) -> bool:
    return (control / "way").read_text() == SECRET


def way_out(outside: Path) -> bytes:
    """Return a zip archive with a link that leads out, and a file behind it."""
    buffer = io.BytesIO(zipped_as("way", str(outside).encode(), stat.S_IFLNK | 0o777))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("way/planted", PLANTED)
    return buffer.getvalue()


ESCAPES = [
    Escape(
        "tar, absolute path",
        lambda outside: tarred_as(entry(str(outside / "planted")), content=PLANTED),
        trusting_tar,
        planted,
        "absolute path",
    ),
    Escape("tar, dots", lambda _: tarred({"../../../planted": PLANTED}), trusting_tar, planted, "leads out"),
    Escape(
        "tar, dots within",
        lambda _: tarred({"a/": b"", "a/../../../../planted": PLANTED}),
        trusting_tar,
        planted,
        "leads out",
    ),
    Escape(
        "tar, file behind a symbolic link",
        lambda outside: tarred_as(
            entry("way", tarfile.SYMTYPE, str(outside)), entry("way/planted"), content=PLANTED
        ),
        trusting_tar,
        planted,
        "a symbolic link",
    ),
    Escape(
        "tar, symbolic link to a file",
        lambda outside: tarred_as(entry("way", tarfile.SYMTYPE, str(outside / "secret"))),
        trusting_tar,
        reads_secret,
        "a symbolic link",
    ),
    Escape(
        "tar, hard link to a file",
        lambda _: tarred_as(entry("way", tarfile.LNKTYPE, "../../../secret")),
        trusting_tar,
        reads_secret,
        "a hard link",
    ),
    Escape(
        "zip, absolute path",
        lambda outside: zipped({str(outside / "planted"): PLANTED}),
        trusting_zip,
        planted,
        "absolute path",
    ),
    Escape("zip, dots", lambda _: zipped({"../../../planted": PLANTED}), trusting_zip, planted, "leads out"),
    Escape("zip, dots and backslashes", lambda _: zipped({"..\\..\\..\\planted": PLANTED}), trusting_zip, planted,
           "leads out"),
    Escape("zip, file behind a symbolic link", way_out, trusting_zip, planted, "a symbolic link"),
    Escape(
        "zip, symbolic link to a file",
        lambda outside: zipped_as("way", str(outside / "secret").encode(), stat.S_IFLNK | 0o777),
        trusting_zip,
        reads_secret,
        "a symbolic link",
    ),
]  # fmt: skip


@pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.name)
async def test_no_archive_reaches_out_of_its_folder(escape: Escape, files: Tree, secret: Path, folder: Path) -> None:
    outside = secret.parent
    data = escape.made(outside)
    control = outside / "control/in/here"
    control.mkdir(parents=True)
    escape.trusting(data, control)
    assert escape.reached(control, outside), "the control is held, so the attempt shows nothing"
    (outside / "planted").unlink(missing_ok=True)
    arrival = await receive(files, [Sent("sent", data)])
    assert escape.reason in arrival.arrived[0].left_packed
    assert [path.name for path in (folder / "attachments").iterdir()] == ["sent"]
    assert not (outside / "planted").exists()
    assert secret.read_text() == SECRET


@pytest.mark.parametrize(
    ("kind", "is_it"),
    [
        (tarfile.FIFOTYPE, stat.S_ISFIFO),
        pytest.param(
            tarfile.CHRTYPE,
            stat.S_ISCHR,
            marks=pytest.mark.skipif(not IS_ROOT, reason="only root makes devices, so others have no control"),
        ),
    ],
    ids=["named pipe", "device"],
)
async def test_no_archive_makes_anything_but_files_and_folders(
    kind: bytes, is_it: Callable[[int], bool], files: Tree, tmp_path: Path, folder: Path
) -> None:
    data = tarred_as(entry("thing", kind))
    trusting_tar(data, tmp_path / "control")
    assert is_it((tmp_path / "control/thing").stat().st_mode)
    arrival = await receive(files, [Sent("sent.tar", data)])
    assert "an entry is a" in arrival.arrived[0].left_packed
    assert [path.name for path in (folder / "attachments").iterdir()] == ["sent.tar"]


async def test_no_archive_leaves_a_setuid_file(files: Tree, tmp_path: Path, folder: Path) -> None:
    data = tarred_as(entry("run", mode=0o4755), content=b"#!/bin/sh")
    trusting_tar(data, tmp_path / "control")
    assert (tmp_path / "control/run").stat().st_mode & stat.S_ISUID
    await receive(files, [Sent("sent.tar", data)])
    assert stat.S_IMODE((folder / "attachments/sent/run").stat().st_mode) == 0o755


def _inflated(data: bytes, offset: int) -> int:
    """Inflate what follows the header at an offset of a zip archive, whatever sizes stand there."""
    name_len, extra_len = struct.unpack_from("<2H", data, offset + 26)
    return len(zlib.decompressobj(-15).decompress(data[offset + 30 + name_len + extra_len :]))


ROOM = Room(unpacked_bytes=8_000_000, slack_bytes=4_000_000, ratio=100)


def ours(data: bytes) -> Meter:
    """Read an archive to the end as Skep does, and return what was counted; it has to be refused."""
    meter, kind = Meter(ROOM, len(data)), media_type(data)
    file = io.BytesIO(data)
    members = read_zip(file, meter) if kind == "application/zip" else read_tar(file, PACKINGS[kind], meter)
    with pytest.raises(NotUnpacked):
        for member in members:
            for piece in member.pieces:
                assert len(piece) <= PIECE
    return meter


@pytest.mark.parametrize("packer", list(PACKERS)[1:])
def test_a_bomb_is_left_before_it_is_large(packer: str) -> None:
    content = tarred({"zeros": bytes(100_000_000)})
    data = PACKERS[packer](content)
    assert len(content) > 1000 * len(data) or packer == ".tar.gz"
    assert ours(data).unpacked_bytes <= ROOM.slack_bytes + ROOM.ratio * len(data) + PIECE


def test_a_bomb_that_names_a_small_size_is_left_before_it_is_large() -> None:
    data = lying(bytes(100_000_000), told=10)
    assert zipfile.ZipFile(io.BytesIO(data)).infolist()[0].file_size == 10
    assert _inflated(data, 0) == 100_000_000
    assert ours(data).unpacked_bytes <= ROOM.unpacked_bytes + PIECE


def test_entries_that_share_their_bytes_are_left() -> None:
    data = overlapping(500, bytes(1_000_000))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        places = [info.header_offset for info in archive.infolist()]
    assert sum(_inflated(data, place) for place in places) == 500_000_000 > 1000 * len(data)
    meter = ours(data)
    assert meter.unpacked_bytes == 0


def test_entries_that_lie_in_each_other_are_left() -> None:
    """Quote the headers of further files within a file, so that each unpacks to more than the one before."""
    inner = local(b"b", deflated(b"x" * 1000), 1000, zlib.crc32(b"x" * 1000))
    packed = b"\0" + struct.pack("<2H", len(inner), len(inner) ^ 0xFFFF) + inner + b"\3\0"
    whole = zlib.decompressobj(-15).decompress(packed)
    assert whole == inner
    files = local(b"a", packed, len(whole), zlib.crc32(whole))
    second = files.index(inner)
    lines = listed(b"a", 0, packed, len(whole), zlib.crc32(whole)) + listed(
        b"b", second, deflated(b"x" * 1000), 1000, zlib.crc32(b"x" * 1000)
    )
    data = ended(files, lines, 2)
    assert (_inflated(data, 0), _inflated(data, second)) == (len(inner), 1000)
    with pytest.raises(NotUnpacked, match="overlap"):
        list(read_zip(io.BytesIO(data), Meter(ROOM, len(data))))


def test_a_packing_that_gives_everything_at_once_is_left() -> None:
    data = zipped({"zeros": bytes(50_000_000)}, zipfile.ZIP_BZIP2)
    _, _, packed = data.partition(b"zeros")
    assert len(bz2.BZ2Decompressor().decompress(packed[:4096])) == 50_000_000
    assert ours(data).unpacked_bytes == 0


class Largest(io.BytesIO):
    """A file that knows how much was asked of it at once."""

    most = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.most = max(self.most, len(data))
        return data


def test_a_header_of_any_size_is_not_read_whole() -> None:
    info = entry("x", b"x")
    info.size = 60_000_000
    data = info.tobuf() + b"30 comment=" + b"a" * 18 + b"\n" + bytes(60_000_000) + bytes(1024)
    trusting = Largest(data)
    with pytest.raises(tarfile.TarError), tarfile.open(fileobj=trusting) as archive:
        archive.getmembers()
    assert trusting.most >= 60_000_000
    careful = Largest(data)
    with pytest.raises(NotUnpacked, match="extended header"):
        list(read_tar(careful, "plain", Meter(ROOM, len(data))))
    assert careful.most <= PIECE


def test_what_two_programs_would_read_differently_is_left() -> None:
    crc = zlib.crc32(b"1")
    data = ended(local(b"shown", deflated(b"1"), 1, crc), listed(b"taken", 0, deflated(b"1"), 1, crc), 1)
    assert data[30:35] == b"shown"
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == ["taken"]
    with pytest.raises(NotUnpacked, match="not what the list says"):
        list(read_zip(io.BytesIO(data), Meter(ROOM, len(data))))


async def test_a_name_that_ends_early_is_left(files: Tree) -> None:
    data = zipped({"harmlessX.exe": b"1"}).replace(b"harmlessX", b"harmless\0")
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == ["harmless"]
    arrival = await receive(files, [Sent("sent.zip", data)])
    assert "NUL" in arrival.arrived[0].left_packed


async def test_an_encrypted_archive_is_left(files: Tree) -> None:
    plain = zipped({"a": b"1"})
    at = plain.index(b"PK\1\2")
    data = plain[:6] + b"\1" + plain[7 : at + 8] + b"\1" + plain[at + 9 :]
    with pytest.raises(RuntimeError, match="encrypted"):
        zipfile.ZipFile(io.BytesIO(data)).read("a")
    arrival = await receive(files, [Sent("sent.zip", data)])
    assert "encrypted" in arrival.arrived[0].left_packed


@pytest.mark.parametrize("pair", [("a", "A"), ("dir/a", "DIR/b"), ("é", "e\u0301"), ("straße", "STRASSE"), ("ﬁ", "fi")])
@pytest.mark.parametrize("pack", [zipped, tarred])
async def test_one_entry_does_not_take_the_place_of_another(
    pair: tuple[str, str], pack: Callable[..., bytes], files: Tree
) -> None:
    folded = {unicodedata.normalize("NFKC", name).casefold().partition("/")[0] for name in pair}
    assert len(folded) == 1  # so they are one on a system that compares names so
    arrival = await receive(files, [Sent("sent", pack(dict.fromkeys(pair, b"1")))])
    assert "case or accents" in arrival.arrived[0].left_packed


@pytest.mark.parametrize("pair", [("a", "a"), ("a", "./a"), ("a", "a/b"), ("a/b", "a")])
async def test_no_path_is_there_twice(pair: tuple[str, str], files: Tree, tmp_path: Path) -> None:
    data = tarred_as(*map(entry, pair), content=b"1")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert len(archive.getmembers()) == 2
        with contextlib.suppress(OSError):  # a file stands where a folder has to be
            archive.extractall(tmp_path / "control", filter="fully_trusted")
        assert len([path for path in (tmp_path / "control").rglob("*") if path.is_file()]) == 1
    arrival = await receive(files, [Sent("sent.tar", data)])
    assert re.match("an entry (has no name, or that of another|is a file and a folder)", arrival.arrived[0].left_packed)


@pytest.mark.parametrize("place", ["attachments", "attachments/a.zip", "attachments/a"])
async def test_nothing_is_written_through_a_planted_link(place: str, files: Tree, folder: Path, secret: Path) -> None:
    target = secret.parent / "target"
    target.mkdir()
    target.chmod(0o777)
    leads_to = secret if place.endswith(".zip") else target
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).symlink_to(leads_to)
    if os.geteuid() == 0:
        os.chown((folder / place).parent, *files.owner or (0, 0))
    through = folder / place if leads_to == secret else folder / place / "through"
    through.write_bytes(PLANTED)
    assert (secret if leads_to == secret else target / "through").read_bytes() == PLANTED
    secret.write_text(SECRET)
    (target / "through").unlink(missing_ok=True)

    arrival = await receive(files, [Sent("a.zip", zipped({"inside": b"1"}))])
    assert (secret.read_text(), list(target.iterdir())) == (SECRET, [])
    (arrived,) = arrival.arrived
    assert zipfile.is_zipfile(folder / arrived.path)
    assert arrived.unpacked is not None
    assert (folder / arrived.unpacked.folder / "inside").read_bytes() == b"1"
    assert (arrival.set_aside is None) == (place != "attachments")
    assert not (folder / "attachments").is_symlink()


async def test_links_that_come_and_go_lead_nothing_out(secret: Path, folder: Path) -> None:
    """Swap the folder for a link to the host while files arrive; they stay in the sandbox wherever it leads."""
    target = secret.parent / "target"
    target.mkdir()
    target.chmod(0o777)
    swap = f"""
        mkdir -p attachments
        while :; do
            mv attachments aside; ln -s {target} attachments; rm attachments; mv aside attachments
        done
    """
    async with Sandbox.create(folder) as sandbox:
        job = await sandbox.background(swap)
        for number in range(40):
            with contextlib.suppress(SkepError):  # the agent may well spoil its own attachments
                await receive(sandbox.files, [Sent("a.zip", zipped({f"{number}": b"1"}))])
        await job.kill()
    assert list(target.iterdir()) == []
    (folder / "link").symlink_to(target)
    (folder / "link" / "through").write_bytes(PLANTED)
    assert (target / "through").exists()
