"""Streams of packed bytes, unpacked piece by piece.

No piece is larger than asked for, whatever the packed bytes say: `bz2`, `lzma` and `zlib` are told how much to give,
and the dictionaries of xz and zstd are bounded.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Literal, Protocol

from skep.sessions.member import Meter, NotUnpacked

Packing = Literal["plain", "gzip", "bzip2", "xz", "zstd"]
PACKINGS: dict[str, Packing] = {
    "application/x-tar": "plain",
    "application/gzip": "gzip",
    "application/x-bzip2": "bzip2",
    "application/x-xz": "xz",
    "application/zstd": "zstd",
}
PIECE = 256 << 10
#: Enough for what `xz -9` and `zstd --long` make.
_DICTIONARY_BYTES = 128 << 20
#: Parallel packers make one stream per block, so there may be many.
_STREAMS = 100_000
_RAW = -15
_GZIP = 31


def unpacked(file: BinaryIO, packing: Packing, meter: Meter) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file from its beginning, each piece counted."""
    file.seek(0)
    with readable():
        for piece in _pieces(file, packing):
            meter.unpacked(len(piece))
            yield piece


def inflated(data: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what one deflated stream holds, as zip archives have it; nothing may follow it."""
    unpacker = zlib.decompressobj(_RAW)
    for packed in data:
        rest = packed
        while rest and not unpacker.eof:
            yield unpacker.decompress(rest, PIECE)
            rest = unpacker.unconsumed_tail
        if unpacker.unused_data or (rest and unpacker.eof):
            raise NotUnpacked("it is damaged: a file goes on after its end")
    while not unpacker.eof:
        piece = unpacker.decompress(b"", PIECE)
        if not piece and not unpacker.eof:
            raise NotUnpacked("it is damaged: a file is cut off")
        yield piece


@contextmanager
def readable() -> Iterator[None]:
    """Say of packed bytes that make no sense that the archive is damaged."""
    try:
        yield
    except (zlib.error, lzma.LZMAError, EOFError, OSError, ValueError) as error:
        raise NotUnpacked(f"it is damaged: {error}") from error


def _pieces(file: BinaryIO, packing: Packing) -> Iterator[bytes]:
    match packing:
        case "plain":
            return iter(lambda: file.read(PIECE), b"")
        case "gzip":
            return _streams(file, _Gzip)
        case "bzip2":
            return _streams(file, bz2.BZ2Decompressor)
        case "xz":
            return _streams(file, _xz)
        case "zstd":
            return _zstd(file)


class _Unpacker(Protocol):
    """What `bz2` and `lzma` have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gzip:
    """One member of a gzip file, with the manners of `bz2`."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(_GZIP)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        piece = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        # A full piece may not be all: zlib keeps what did not fit even when it has read everything.
        self.needs_input = not self._zlib.unconsumed_tail and len(piece) < max_length
        return piece


def _xz() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_DICTIONARY_BYTES)


def _streams(file: BinaryIO, unpacker: Callable[[], _Unpacker]) -> Iterator[bytes]:
    """Yield what one stream after the other holds; zeros may fill up the end."""
    rest = file.read(PIECE)
    for _ in range(_STREAMS):
        if not rest.strip(b"\0"):
            return
        stream = unpacker()
        while not stream.eof:
            if stream.needs_input and not rest:
                rest = file.read(PIECE)
                if not rest:
                    raise NotUnpacked("it is damaged: it is cut off")
            yield stream.decompress(rest if stream.needs_input else b"", PIECE)
            rest = b""
        rest = stream.unused_data or file.read(PIECE)
    raise NotUnpacked(f"it is packed in more than {_STREAMS} pieces")


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=_DICTIONARY_BYTES)
    try:
        with unpacker.stream_reader(file, read_across_frames=True, closefd=False) as stream:
            yield from iter(lambda: stream.read(PIECE), b"")
    except zstandard.ZstdError as error:
        raise NotUnpacked(f"it is damaged: {error}") from error
