"""Read tar archives strictly, in one pass, and without believing a size.

`tarfile` reads extended headers whole, however large they say they are, and takes links, devices and sparse files; so
the few rules that archives of files and folders need are here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

from skep.sessions.filenames import shown
from skep.sessions.member import Member, Meter, NotUnpacked
from skep.sessions.packing import Packing, unpacked
from skep.sessions.sniff import is_tar

_BLOCK = 512
_EXTENDED_BYTES = 64 << 10
_RECORD = re.compile(rb"(\d{1,6}) ")
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a named pipe",
    b"K": "a link",
    b"S": "a sparse file",
    b"M": "a part of a file",
}


def holds_tar(file: BinaryIO, packing: Packing, meter: Meter) -> bool:
    """Say whether what is packed begins as a tar archive does."""
    try:
        return is_tar(_Source(unpacked(file, packing, meter)).take(_BLOCK))
    except NotUnpacked:
        return False


def read_tar(file: BinaryIO, packing: Packing, meter: Meter) -> Iterator[Member]:
    """Yield the files and folders of a tar archive, in its order."""
    source = _Source(unpacked(file, packing, meter))
    told: dict[bytes, bytes] = {}
    while (block := source.take(_BLOCK)).strip(b"\0"):
        if not is_tar(block):
            raise NotUnpacked("it is damaged: a header is not one")
        meter.entry()
        kind, size = block[156:157], _number(block[124:136])
        match kind:
            case b"x" | b"g":
                told |= _records(source.take(_bounded(size)), common=kind == b"g")
                source.skip(-size % _BLOCK)
            case b"L":
                told[b"path"] = source.take(_bounded(size)).partition(b"\0")[0]
                source.skip(-size % _BLOCK)
            case _:
                yield _member(block, told, source)
                told = {}


def _member(block: bytes, told: dict[bytes, bytes], source: _Source) -> Member:
    raw = told.get(b"path") or _name(block)
    name = raw.decode(errors="surrogateescape")
    kind = block[156:157]
    if kind in _REFUSED:
        raise NotUnpacked(f"an entry is {_REFUSED[kind]}: {shown(name)}")
    if kind not in (b"0", b"\0", b"5", b"7"):
        raise NotUnpacked(f"an entry is of an unknown kind: {shown(name)}")
    size = _decimal(told[b"size"]) if b"size" in told else _number(block[124:136])
    folder = kind == b"5" or (kind == b"\0" and raw.endswith(b"/"))
    if size and (folder or raw.endswith(b"/")):
        raise NotUnpacked(f"a folder has a content: {shown(name)}")
    return Member(name, folder, bool(_number(block[100:108]) & 0o100), source.content(size))


def _name(block: bytes) -> bytes:
    name, prefix = (part.partition(b"\0")[0] for part in (block[:100], block[345:500]))
    # Only this form of the header has a prefix; the GNU one keeps times there.
    if prefix and block[257:265] == b"ustar\x0000":
        return prefix + b"/" + name
    return name


def _records(data: bytes, *, common: bool) -> dict[bytes, bytes]:
    """Read the records of an extended header, and keep those that decide something."""
    found: dict[bytes, bytes] = {}
    while data:
        head = _RECORD.match(data)
        length = int(head[1]) if head else 0
        key, equals, value = data[head.end() if head else 0 : max(length - 1, 0)].partition(b"=")
        if not equals or data[length - 1 : length] != b"\n":
            raise NotUnpacked("it is damaged: an extended header is not one")
        if key.startswith(b"GNU.sparse."):
            raise NotUnpacked("an entry is a sparse file")
        if key in (b"path", b"size"):
            found[key] = value
        data = data[length:]
    if common and found:
        raise NotUnpacked("one header names all entries")
    return found


def _bounded(size: int) -> int:
    if size > _EXTENDED_BYTES:
        raise NotUnpacked(f"an extended header has more than {_EXTENDED_BYTES} bytes")
    return size


def _number(data: bytes) -> int:
    """Read a number in octal digits, or in the form for large ones."""
    if data[0] == 0x80:
        return int.from_bytes(data[1:], "big")
    digits = data.partition(b"\0")[0].strip(b" ")
    if not re.fullmatch(rb"[0-7]*", digits):
        raise NotUnpacked("it is damaged: a header has no number where one belongs")
    return int(digits or b"0", 8)


def _decimal(data: bytes) -> int:
    if not re.fullmatch(rb"\d{1,20}", data):
        raise NotUnpacked("it is damaged: a size is not a number")
    return int(data)


class _Source:
    """Take exact amounts from a stream of pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._kept = b""
        #: What of the last member has not been read.
        self._left = 0

    def take(self, count: int) -> bytes:
        self._finish()
        return b"".join(self._next(count))

    def skip(self, count: int) -> None:
        for _ in self._next(count):
            pass

    def content(self, size: int) -> Iterator[bytes]:
        """Give the bytes of a member; what is not read of them is skipped when the next is taken."""
        filling = -size % _BLOCK
        self._left = size + filling

        def pieces() -> Iterator[bytes]:
            while self._left > filling:
                piece = self._some(self._left - filling)
                self._left -= len(piece)
                yield piece

        return pieces()

    def _finish(self) -> None:
        left, self._left = self._left, 0
        self.skip(left)

    def _next(self, count: int) -> Iterator[bytes]:
        while count:
            piece = self._some(count)
            count -= len(piece)
            yield piece

    def _some(self, most: int) -> bytes:
        while not self._kept:
            piece = next(self._pieces, None)
            if piece is None:
                raise NotUnpacked("it is damaged: it is cut off")
            self._kept = piece
        piece, self._kept = self._kept[:most], self._kept[most:]
        return piece
