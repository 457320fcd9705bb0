"""Bring content into the store in several threads, with only so much of it on the way at a time."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from skep.workspace.archive.chunks import Chunks
from skep.workspace.archive.watch import Watch

CHUNK = 4 << 20
#: Files below this are put together.
SMALL = 1 << 20
_GROUP = 1 << 20


class Piece:
    """Content on its way into the store; the name of its chunk is known when it is there."""

    __slots__ = ("_chunk", "future")

    def __init__(self) -> None:
        self.future: Future[str] | None = None
        self._chunk = ""

    def chunk(self) -> str:
        if self.future is not None:
            self._chunk, self.future = self.future.result(), None
        return self._chunk


#: Where content is: the piece or the chunk, or None for a hole; the offset in it; the length.
Part = tuple[Piece | str | None, int, int]


class Conveyor:
    """Names, compresses, encrypts and stores what it is given. To be given things by one thread."""

    def __init__(self, chunks: Chunks, watch: Watch, *, renew: Callable[[], None], lanes: int) -> None:
        self._chunks = chunks
        self._watch = watch
        self._renew = renew
        self._pool = ThreadPoolExecutor(lanes, thread_name_prefix="skep-save")
        self._room = threading.BoundedSemaphore(lanes + 2)
        self._failure: BaseException | None = None
        self._group: list[bytes] = []
        self._grouped = 0
        self._piece = Piece()

    def close(self) -> None:
        """Wait for what is being stored, and forget what is not yet."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def send(self, data: bytes) -> Piece:
        """Take content, waiting while there is enough on the way; raise what has stopped another piece."""
        piece = Piece()
        self._send(data, piece)
        return piece

    def group(self, data: bytes, path: str) -> Part:
        """Take the content of a small file, to be stored together with that of others."""
        part = (self._piece, self._grouped, len(data))
        self._group.append(data)
        self._grouped += len(data)
        if self._grouped >= _GROUP and (depends_on(path, 8) or self._grouped > CHUNK - SMALL):
            self.end_group()
        return part

    def end_group(self) -> None:
        if self._group:
            self._send(b"".join(self._group), self._piece)
            self._group, self._grouped, self._piece = [], 0, Piece()

    def _send(self, data: bytes, piece: Piece) -> None:
        self._renew()
        self._room.acquire()
        if self._failure is not None:
            raise self._failure
        piece.future = self._pool.submit(self._store, data)

    def _store(self, data: bytes) -> str:
        try:
            self._watch.check()
            chunk, written = self._chunks.keep(data)
            self._watch.count(moved_bytes=written)
        except BaseException as failure:
            self._failure = self._failure or failure
            raise
        else:
            return chunk
        finally:
            self._room.release()


def depends_on(path: str, one_in: int) -> bool:
    """Draw by a path: the same path always draws the same."""
    return zlib.crc32(os.fsencode(path)) % one_in == 0
