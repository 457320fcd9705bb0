"""The files of a workspace as a stream, to a machine elsewhere and back from it.

What comes back is hostile: an agent may run whatever packs it. Rows are checked as an archive's are and written by the
same hands, no more is written than the workspace may hold, and nothing is used before the digest at the end is right.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from skep.errors import ArchiveDamaged, LimitReached, StorageFull, Unavailable, WorkspaceDamaged
from skep.sandbox.census import Usage
from skep.sandbox.claim import Owner
from skep.sandbox.erase import erase
from skep.sandbox.twin.inside.packing import (
    DATA,
    END,
    FAILED,
    HOLE,
    LENGTH,
    MOST_NOTED,
    PIECE,
    PIECE_LIMIT,
    ROW_LIMIT,
    SAME,
    SAME_FROM,
    Packing,
    joined,
)
from skep.workspace.archive.index import Row
from skep.workspace.archive.planting import Planting
from skep.workspace.layers.copying import flush

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = ("folder", "file", "link", "name", "pipe", "socket")
_ROW = TypeAdapter(Row)
_READ = 1 << 18
_DIGEST_BYTES = 32
#: What a row may have before it counts: more than a name, a mode and a few numbers take.
_FREE_BYTES = 1024
#: How long a machine may take to send the next bytes.
_SILENCE_S = 120.0

#: Where content is that need not be sent again: paths below a folder of this machine, by the digest.
Contents = Mapping[bytes, bytes]


@dataclass(slots=True)
class Sent:
    """What was sent: where the content is that the other side has, too."""

    contents: dict[bytes, bytes]


async def send(folder: Path, sent: Sent) -> AsyncGenerator[bytes, None]:
    """Yield a folder of this machine, in which nobody writes now, as a stream."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    packing = asyncio.ensure_future(asyncio.to_thread(_pack, folder, writing))
    try:
        while piece := await asyncio.to_thread(os.read, reading, _READ):
            yield piece
        sent.contents = await packing
    finally:
        os.close(reading)
        await asyncio.wait([packing])
        packing.exception()  # whoever reads no further does not want to know


def _pack(folder: Path, writing: int) -> dict[bytes, bytes]:
    with open(writing, "wb", buffering=_READ) as pipe:
        top = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            packing = Packing(pipe.write, noting=True)
            packing.run(top)
        finally:
            os.close(top)
    return packing.contents


class Feed:
    """A stream that comes in an event loop, for a thread to read."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._loop = asyncio.get_running_loop()
        self._held = memoryview(b"")

    def read(self, amount: int) -> memoryview:
        """Return at most so many bytes; none at the end."""
        if not self._held:
            self._held = memoryview(asyncio.run_coroutine_threadsafe(self._next(), self._loop).result())
        piece, self._held = self._held[:amount], self._held[amount:]
        return piece

    async def _next(self) -> bytes:
        try:
            async with asyncio.timeout(_SILENCE_S):
                return await anext(self._pieces, b"")
        except TimeoutError as error:
            raise Unavailable(
                f"the machine sent nothing more of its files for {_SILENCE_S:.0f} s", hint="try again; it keeps them"
            ) from error


class Unpacking:
    """A stream that becomes a folder here. `room` is the most that it may take."""

    def __init__(self, feed: Feed, *, room: Usage, base: Path, contents: Contents) -> None:
        self._feed = feed
        self._room = room
        self._base = base
        self._contents = contents
        self._digest = hashlib.sha256()
        self._inodes = self._bytes = 0
        #: The paths of the folders that are open, and of what was last in the lowest.
        self._trail: list[bytes | None] = [b""]
        #: Where the content is that both sides have now.
        self.held: dict[bytes, bytes] = {}

    def into(self, target: Path, owner: Owner | None) -> None:
        """Write the folder, which is there and empty; when this returns it is on the disk."""
        links = target.with_name("links")
        links.mkdir(mode=0o700)
        with _explained(), _opened(target) as top, _opened(links) as aside:
            try:
                self._fill(top, aside, owner)
                flush(target)
            finally:
                erase(str(links), os.fstat(aside).st_ino)

    def _fill(self, top: int, links: int, owner: Owner | None) -> None:
        planting = _Planting(top, links, (), owner=owner)
        try:
            for row, again in self._rows():
                self._count(row)
                self._go_to(row)
                planting.receive(row, self._pieces(row), again=again)
            planting.finish()
        finally:
            planting.close()

    def _rows(self) -> Iterator[tuple[Row, bool]]:
        while True:
            before = self._digest.hexdigest()
            (length,) = LENGTH.unpack(self._take(LENGTH.size))
            if length > ROW_LIMIT:
                raise _garbled(f"a row of {length} bytes")
            text = self._take(length)
            self._weigh(max(length - _FREE_BYTES, 0))  # notes take room too
            body = _parsed(text)
            if body[0] == END:
                if body[1:] != [before]:
                    raise _garbled("its digest is another")
                return
            if body[0] == FAILED:
                raise Unavailable(
                    f"the machine could not read all of its files: {str(body[1:])[:100]}", hint="look at its disk"
                )
            yield _row(body[0]), body[1:] == [True]

    def _pieces(self, row: Row) -> Iterator[memoryview | int]:
        """Yield what a row's file has in it, whatever is said of its size counted as it comes."""
        left = row.size if row.code == "file" else 0
        digest = hashlib.sha256() if left >= SAME_FROM else None
        while left:
            kind, length = PIECE.unpack(self._take(PIECE.size))
            if not 0 < length <= left:
                raise _garbled("a piece that is longer than its file")
            left -= length
            if kind == HOLE:
                digest = None
                yield length
            elif kind == SAME and length == row.size:
                yield from self._same(bytes(self._take(_DIGEST_BYTES)), length)
                return
            elif kind == DATA and length <= PIECE_LIMIT:
                data = self._take(length)
                self._weigh(length)
                if digest is not None:
                    digest.update(data)
                yield memoryview(data)
            else:
                raise _garbled("a piece of no kind")
        if digest is not None:
            self._note(digest.digest())

    def _same(self, wanted: bytes, size: int) -> Iterator[memoryview]:
        """Yield content that is here already, and only if it really is the same."""
        path = self._contents.get(wanted)
        if path is None:
            raise _garbled("content that nobody has")
        self._weigh(size)
        digest = hashlib.sha256()
        with suppress(OSError), os.fdopen(_open_below(self._base, path), "rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
                yield memoryview(data)
        if digest.digest() != wanted:
            raise WorkspaceDamaged(
                f"{os.fsdecode(path)!r} has changed here while the workspace was elsewhere", hint="try again"
            )
        self._note(wanted)

    def _count(self, row: Row) -> None:
        if row.code not in _KINDS or row.opaque or row.extents:
            raise _garbled(f"a row of the kind {row.code}")
        self._inodes += 1
        if self._inodes > self._room.inodes:
            raise _too_much(f"{self._room.inodes:,} files and folders")

    def _weigh(self, length: int) -> None:
        self._bytes += length
        if self._bytes > self._room.size:
            raise _too_much(f"{self._room.size:,} bytes")

    def _go_to(self, row: Row) -> None:
        """Know the path of what a row describes; that it is one is for whoever writes it to see."""
        del self._trail[max(row.depth, 1) :]
        if row.depth:
            self._trail.append(joined(self._trail[-1], row.name.encode("latin-1", "replace")))

    def _note(self, digest: bytes) -> None:
        path = self._trail[-1]
        if path is not None and len(self.held) < MOST_NOTED:
            self.held[digest] = path

    def _take(self, amount: int) -> bytes:
        data = bytearray()
        while len(data) < amount:
            piece = self._feed.read(amount - len(data))
            if not piece:
                raise _garbled("it ends too early")
            data += piece
        self._digest.update(data)
        return bytes(data)


class _Planting(Planting):
    """A tree whose rows say by themselves whether they will be named again."""

    def receive(self, row: Row, content: Iterator[memoryview | int], *, again: bool) -> None:
        if again:
            self._kept[self._count] = False
        self.add(row, content)

    def _set_attribute(self, fd: int, name: str, value: str) -> None:
        try:
            super()._set_attribute(fd, name, value)
        except OSError as error:
            # What cannot be noted on this disk is no reason to keep the files away from it.
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSPC, errno.E2BIG, errno.ERANGE):
                raise


def _parsed(text: bytes) -> list[Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _garbled("a row that is no JSON") from error
    if not isinstance(body, list) or not body:
        raise _garbled("a row that is none")
    return body


def _row(body: object) -> Row:
    try:
        return _ROW.validate_python(body)
    except ValidationError as error:
        raise _garbled(f"a row whose {error.errors()[0]['loc']} is wrong") from error


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, _FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_below(base: Path, path: bytes) -> int:
    """Open a file below a folder step by step, through no link."""
    *folders, name = path.split(b"/")
    here = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for folder in folders:
            below = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = below
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=here)
    finally:
        os.close(here)


@contextmanager
def _explained() -> Iterator[None]:
    """Say what is wrong with a stream that no folder can be made of."""
    try:
        yield
    except ArchiveDamaged as error:
        raise _garbled(error.message) from error
    except (ValueError, OverflowError) as error:  # a name, a note or a time that no file can have
        raise _garbled(str(error)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                "there is no room here for the files of the workspace", hint="free some space; the machine keeps them"
            ) from error
        if error.errno in (errno.EEXIST, errno.EINVAL, errno.ENAMETOOLONG, errno.EFBIG, errno.ENOENT):
            raise _garbled(os.strerror(error.errno)) from error
        raise


def _garbled(what: str) -> WorkspaceDamaged:
    return WorkspaceDamaged(
        f"what the machine sent is not the files of a workspace: {what}",
        hint="nothing here was changed; try again, or give up what is there: skep workspace fetch --abandon",
    )


def _too_much(limit: str) -> LimitReached:
    return LimitReached(
        f"the workspace holds more than the {limit} that it may have here",
        hint="remove files with `skep exec`; the machine keeps them until then",
    )
