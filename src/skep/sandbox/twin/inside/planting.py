"""Make a folder what a stream of `packing` says. The stream is the controller's, the names in it are anybody's."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

from skep.sandbox.twin.inside.packing import DATA, END, HOLE, LENGTH, PIECE, PIECE_LIMIT, ROW_LIMIT

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NODES = {"pipe": stat.S_IFIFO, "socket": stat.S_IFSOCK}

Read = Callable[[int], bytes]


class Stream:
    """The rows and pieces of a stream, from a `read` that returns at most so many bytes, and none at the end."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._digest = hashlib.sha256()

    def rows(self) -> Iterator[tuple[list[Any], bool]]:
        """Yield the rows, each with whether its file has other names; the content has to be taken in between."""
        while True:
            before = self._digest.hexdigest()
            (length,) = LENGTH.unpack(self._take(LENGTH.size))
            if length > ROW_LIMIT:
                raise _garbled()
            row = json.loads(self._take(length))
            if row[0] == END:
                if row[1] != before:
                    raise _garbled()
                return
            yield row[0], bool(row[1])

    def content(self, size: int) -> Iterator[bytes | int]:
        """Yield a file's content: bytes, and the lengths of holes."""
        while size > 0:
            kind, length = PIECE.unpack(self._take(PIECE.size))
            if not 0 < length <= size or (kind == DATA and length > PIECE_LIMIT) or kind not in (DATA, HOLE):
                raise _garbled()
            size -= length
            yield self._take(length) if kind == DATA else length

    def _take(self, amount: int) -> bytes:
        data = bytearray()
        while len(data) < amount:
            piece = self._read(amount - len(data))
            if not piece:
                raise _garbled()
            data += piece
        self._digest.update(data)
        return bytes(data)


class Planting:
    """A folder in the making. What has other names is remembered by its path from the top."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._here = os.open(".", _FOLDER, dir_fd=top)
        self._open: list[list[Any]] = []
        self._links = f".skep-links-{os.urandom(8).hex()}"
        self._count = 0

    def run(self, stream: Stream) -> None:
        os.mkdir(self._links, 0o700, dir_fd=self._top)
        links = os.open(self._links, _FOLDER, dir_fd=self._top)
        try:
            for row, again in stream.rows():
                self._add(row, stream, links if again else None, links)
                self._count += 1
            while len(self._open) > 1:
                self._leave()
            _clear(links)
            os.rmdir(self._links, dir_fd=self._top)
            if self._open:
                _dress(self._here, self._open.pop())
        finally:
            os.close(links)
            os.close(self._here)

    def _add(self, row: list[Any], stream: Stream, keep: int | None, links: int) -> None:
        code, depth, text, mode, mtime, size, _, target, back, *_ = row
        name = text.encode("latin-1")
        while depth < len(self._open):
            self._leave()
        if code == "folder":
            self._enter(row, name)
        elif code == "file":
            self._write(row, name, stream.content(size))
            if keep is not None:
                os.link(name, str(self._count), src_dir_fd=self._here, dst_dir_fd=keep, follow_symlinks=False)
        elif code == "name":
            os.link(str(self._count - back), name, src_dir_fd=links, dst_dir_fd=self._here, follow_symlinks=False)
        elif code == "link":
            os.symlink(target.encode("latin-1"), name, dir_fd=self._here)
            os.utime(name, ns=(mtime, mtime), dir_fd=self._here, follow_symlinks=False)
        elif code in _NODES:
            os.mknod(name, _NODES[code] | 0o600, dir_fd=self._here)
            os.chmod(name, mode & 0o1777, dir_fd=self._here)
            os.utime(name, ns=(mtime, mtime), dir_fd=self._here)
        else:
            raise _garbled()

    def _enter(self, row: list[Any], name: bytes) -> None:
        if name:
            os.mkdir(name, 0o700, dir_fd=self._here)
            below = os.open(name, _FOLDER, dir_fd=self._here)
            os.close(self._here)
            self._here = below
        self._open.append(row)

    def _leave(self) -> None:
        above = os.open("..", _FOLDER, dir_fd=self._here)
        _dress(self._here, self._open.pop())
        os.close(self._here)
        self._here = above

    def _write(self, row: list[Any], name: bytes, content: Iterator[bytes | int]) -> None:
        fd = os.open(name, _NEW, 0o600, dir_fd=self._here)
        try:
            for piece in content:
                if isinstance(piece, int):
                    os.lseek(fd, piece, os.SEEK_CUR)
                else:
                    view = memoryview(piece)
                    while view:
                        view = view[os.write(fd, view) :]
            os.ftruncate(fd, row[5])
            _dress(fd, row)
        finally:
            os.close(fd)


def _dress(fd: int, row: list[Any]) -> None:
    for name, value in row[10].items():
        with contextlib.suppress(OSError):  # not every file system has room for notes
            os.setxattr(fd, name.encode("latin-1"), value.encode("latin-1"))
    os.fchmod(fd, row[3] & 0o1777)
    os.utime(fd, ns=(row[4], row[4]))


def _clear(folder: int) -> None:
    for name in os.listdir(folder):
        os.unlink(name, dir_fd=folder)


def _garbled() -> OSError:
    return OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
