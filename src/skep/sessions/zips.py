"""Read zip archives strictly: what is listed at the end, what stands before each file and what comes out must agree.

`zipfile` takes files that overlap, lists of any length, and bytes of bzip2 and lzma that unpack to any size at once;
and where list and file disagree, programs differ in what they unpack. All that is refused here.
"""

from __future__ import annotations

import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

from skep.sessions.filenames import shown
from skep.sessions.member import Member, Meter, NotUnpacked
from skep.sessions.packing import PIECE, inflated, readable

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_WAY64 = struct.Struct("<4sIQI")
_LISTED = struct.Struct("<4s4x2H4x3I3H4x2I")
_LOCAL = struct.Struct("<4s2x2H16x2H")
_COMMENT_BYTES = 0xFFFF
_NONE16, _NONE32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x2041
_UTF8 = 0x800
_STORED, _DEFLATED = 0, 8
#: Where no file reaches, and `seek` still works.
_FARTHEST = 1 << 40


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file as the list at the end has it."""

    raw: bytes
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    offset: int
    mode: int

    @property
    def name(self) -> str:
        if self.flags & _UTF8:
            return self.raw.decode(errors="surrogateescape")
        try:
            return self.raw.decode()
        except UnicodeDecodeError:
            return self.raw.decode("cp437")


def read_zip(file: BinaryIO, meter: Meter) -> Iterator[Member]:
    """Yield the files and folders of a zip archive, in the order in which they lie."""
    offset, size, count = _directory(file)
    entries = sorted(_listed(file, offset, size, meter), key=lambda entry: entry.offset)
    if len(entries) != count:
        raise NotUnpacked("it is damaged: it does not have the number of entries it names")
    starts = [_start(file, entry) for entry in entries]
    ends = [start + entry.packed for start, entry in zip(starts, entries, strict=True)]
    begins = [entry.offset for entry in entries]
    if any(end > begin for end, begin in zip(ends, [*begins[1:], offset], strict=True)) or any(
        first == second for first, second in pairwise(begins)
    ):
        raise NotUnpacked("entries overlap")
    for entry, start in zip(entries, starts, strict=True):
        folder = entry.raw.endswith((b"/", b"\\"))
        if folder and (entry.size or entry.packed > 2):  # an empty deflated stream has two bytes
            raise NotUnpacked(f"a folder has a content: {shown(entry.name)}")
        pieces = iter(()) if folder else _content(file, entry, start, meter)
        yield Member(entry.name, folder, bool(entry.mode & 0o100), pieces)


def _directory(file: BinaryIO) -> tuple[int, int, int]:
    """Return where the list of entries is, its length in bytes, and in entries."""
    total = file.seek(0, 2)
    tail_at = max(0, total - _END.size - _COMMENT_BYTES)
    tail = _at(file, tail_at, total - tail_at)
    found = tail.rfind(b"PK\5\6")
    if found < 0 or len(tail) - found < _END.size:
        raise NotUnpacked("it is damaged: it has no list of entries")
    _, disk, first, here, count, size, offset, comment = _END.unpack_from(tail, found)
    end = tail_at + found
    if end + _END.size + comment != total:
        raise NotUnpacked("it is damaged: something follows its end")
    if (disk, first) != (0, 0) or here != count:
        raise NotUnpacked("it is a part of a larger archive")
    if count == _NONE16 or _NONE32 in (size, offset):
        end, offset, size, count = _large_directory(file, end)
    if offset + size != end:
        raise NotUnpacked("it is damaged: its list of entries is not where it should be")
    return offset, size, count


def _large_directory(file: BinaryIO, end: int) -> tuple[int, int, int, int]:
    if end < _WAY64.size + _END64.size:
        raise NotUnpacked("it is damaged: it has no list of entries")
    way, _, place, _ = _WAY64.unpack(_at(file, end - _WAY64.size, _WAY64.size))
    if way != b"PK\6\7" or place != end - _WAY64.size - _END64.size:
        raise NotUnpacked("it is damaged: its list of entries is not where it should be")
    mark, _, _, _, disk, first, here, count, size, offset = _END64.unpack(_at(file, place, _END64.size))
    if mark != b"PK\6\6" or (disk, first) != (0, 0) or here != count:
        raise NotUnpacked("it is a part of a larger archive")
    return place, offset, size, count


def _listed(file: BinaryIO, offset: int, size: int, meter: Meter) -> Iterator[_Entry]:
    """Walk the list; its own length is not asked, so a longer one is left at the first entry too many."""
    end = offset + size
    while offset < end:
        meter.entry()
        if end - offset < _LISTED.size:
            raise NotUnpacked("it is damaged: its list of entries is cut off")
        mark, flags, method, crc, packed, unpacked, name_len, extra_len, comment_len, attributes, place = (
            _LISTED.unpack(_at(file, offset, _LISTED.size))
        )
        length = _LISTED.size + name_len + extra_len + comment_len
        if mark != b"PK\1\2" or offset + length > end:
            raise NotUnpacked("it is damaged: its list of entries is not one")
        raw = _at(file, offset + _LISTED.size, name_len)
        extra = _at(file, offset + _LISTED.size + name_len, extra_len)
        unpacked, packed, place = _large(extra, (unpacked, packed, place))
        entry = _Entry(raw, flags, method, crc, packed, unpacked, place, attributes >> 16)
        _check(entry)
        yield entry
        offset += length


def _check(entry: _Entry) -> None:
    if entry.flags & _ENCRYPTED:
        raise NotUnpacked(f"an entry is encrypted: {shown(entry.name)}")
    kind = stat.S_IFMT(entry.mode)
    if kind == stat.S_IFLNK:
        raise NotUnpacked(f"an entry is a symbolic link: {shown(entry.name)}")
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise NotUnpacked(f"an entry is a device or a named pipe: {shown(entry.name)}")
    if (kind == stat.S_IFDIR) and not entry.raw.endswith((b"/", b"\\")):
        raise NotUnpacked(f"an entry is a file and a folder: {shown(entry.name)}")
    if entry.method not in (_STORED, _DEFLATED):
        raise NotUnpacked(f"an entry is packed by method {entry.method}: {shown(entry.name)}")


def _large(extra: bytes, values: tuple[int, int, int]) -> tuple[int, ...]:
    """Fill in numbers that need more than 32 bits and so stand among the extra fields."""
    wanted = [value == _NONE32 for value in values]
    while any(wanted) and len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1 and length >= 8 * sum(wanted) and len(extra) >= 4 + length:
            given = iter(struct.unpack_from(f"<{sum(wanted)}Q", extra, 4))
            return tuple(next(given) if want else value for want, value in zip(wanted, values, strict=True))
        extra = extra[4 + length :]
    return values


def _start(file: BinaryIO, entry: _Entry) -> int:
    """Return where the bytes of a file begin; what stands before them has to agree with the list."""
    head = _at(file, entry.offset, _LOCAL.size)
    mark, flags, method, name_len, extra_len = _LOCAL.unpack(head)
    raw = _at(file, entry.offset + _LOCAL.size, name_len)
    if mark != b"PK\3\4" or raw != entry.raw or method != entry.method or flags & _ENCRYPTED:
        raise NotUnpacked(f"an entry is not what the list says: {shown(entry.name)}")
    return entry.offset + _LOCAL.size + int(name_len) + int(extra_len)


def _content(file: BinaryIO, entry: _Entry, start: int, meter: Meter) -> Iterator[bytes]:
    packed = _span(file, start, entry.packed)
    size = crc = 0
    with readable():
        for piece in inflated(packed) if entry.method == _DEFLATED else packed:
            meter.unpacked(len(piece))
            size, crc = size + len(piece), zlib.crc32(piece, crc)
            yield piece
    if size != entry.size or crc != entry.crc:
        raise NotUnpacked(f"it is damaged: {shown(entry.name)} is not what the list says")


def _span(file: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    while size:
        piece = _at(file, start, min(size, PIECE))
        start, size = start + len(piece), size - len(piece)
        yield piece


def _at(file: BinaryIO, offset: int, size: int) -> bytes:
    data = b""
    if offset < _FARTHEST:
        file.seek(offset)
        data = file.read(size)
    if len(data) != size:
        raise NotUnpacked("it is damaged: it is cut off")
    return data
