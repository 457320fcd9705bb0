"""A folder as one stream of bytes: how files travel from one machine to another.

Each thing in the folder is a row of JSON after its length, folders before what is in them, and the content of a file
follows its row in pieces. The last row has the digest of all bytes before it, so that a stream that was cut or altered
is noticed. The same is done on both sides; what comes from inside is hostile to whoever unpacks it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, NamedTuple

#: The length of a row; what a piece is, and its length.
LENGTH = Struct("!I")
PIECE = Struct("!BQ")
DATA, HOLE, SAME = range(3)
#: What one row, and one piece of data, may have.
ROW_LIMIT = 1 << 19
PIECE_LIMIT = 1 << 18
#: Files of this size and more are not sent if the other side says that it has such content; so many are noted, and
#: no deeper than that.
SAME_FROM = 1 << 14
MOST_NOTED, NOTED_PATH_BYTES = 50_000, 1024
#: In place of a row's code: the end, and that it did not come to it.
END, FAILED = "end", "failed"

_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_CODES = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
_NODES = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
_SPARSE = 1 << 16

Emit = Callable[[bytes], object]


class _Level(NamedTuple):
    """A folder on the way down: which it is, what is left to do in it, and the mode to give back, if any."""

    #: None where it is too deep to be noted.
    path: bytes | None
    identity: tuple[int, int]
    names: Iterator[bytes]
    mode: int | None


class Packing:
    """One folder on its way. `known` are digests of files whose content the other side has.

    With `noting`, `contents` says afterwards where the files are whose content the other side has from then on.
    """

    def __init__(self, emit: Emit, known: frozenset[bytes] = frozenset(), *, noting: bool = False) -> None:
        self._emit = emit
        self._known = known
        self._noting = noting
        self._digest = hashlib.sha256()
        self._count = 0
        self._first: dict[tuple[int, int], int] = {}
        self._levels: list[_Level] = []
        self.contents: dict[bytes, bytes] = {}

    def run(self, top: int) -> None:
        """Send everything in a folder, which may be open as a place alone."""
        try:
            self._walk(top)
        except OSError as error:
            self._send_row([FAILED, os.strerror(error.errno or errno.EIO)])
            raise
        self._send_row([END, self._digest.hexdigest()])

    def _walk(self, top: int) -> None:
        here = self._enter(os.dup(top), b"")
        try:
            while self._levels:
                name = next(self._levels[-1].names, None)
                if name is None:
                    here = self._leave(here)
                    continue
                with contextlib.suppress(FileNotFoundError):  # somebody was faster
                    here = self._add(here, name)
        finally:
            os.close(here)

    def _add(self, here: int, name: bytes) -> int:
        found = os.stat(name, dir_fd=here, follow_symlinks=False)
        kind = stat.S_IFMT(found.st_mode)
        code = _CODES.get(kind) or _NODES.get(kind)
        if code == "folder":
            below = self._enter(os.open(name, _PLACE | os.O_DIRECTORY, dir_fd=here), name)
            os.close(here)
            return below
        if code == "file":
            self._add_file(here, name, found)
        elif code == "link":
            self._row("link", name, found, target=os.readlink(name, dir_fd=here))
        elif code is not None:
            self._row(code, name, found)
        return here  # a device stays where it is: nobody else can make it

    def _enter(self, place: int, name: bytes) -> int:
        """Stand in a folder, which may be shut to its owner."""
        try:
            found = os.fstat(place)
            mode = _open_up(place, found, 0o700)
            here = os.open(".", _FOLDER, dir_fd=place)
        finally:
            os.close(place)
        self._row("folder", name, found, attributes=_attributes(here))
        names = iter(sorted(os.fsencode(one) for one in os.listdir(here)))
        path = joined(self._levels[-1].path, name) if self._levels else b""
        self._levels.append(_Level(path, (found.st_dev, found.st_ino), names, mode))
        return here

    def _leave(self, here: int) -> int:
        level = self._levels.pop()
        above = os.open("..", _FOLDER, dir_fd=here) if self._levels else os.dup(here)
        if level.mode is not None:
            os.fchmod(here, level.mode)
        os.close(here)
        if self._levels:
            found = os.fstat(above)
            if (found.st_dev, found.st_ino) != self._levels[-1].identity:
                os.close(above)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # it was moved meanwhile
        return above

    def _add_file(self, here: int, name: bytes, found: os.stat_result) -> None:
        place = (found.st_dev, found.st_ino)
        if found.st_nlink > 1 and place in self._first:
            self._row("name", name, found, back=self._count - self._first[place])
            return
        fd = _opened(here, name, found)
        try:
            if found.st_nlink > 1:
                self._first[place] = self._count
            self._row("file", name, found, attributes=_attributes(fd), again=found.st_nlink > 1)
            self._send_content(fd, found, name)
        finally:
            os.close(fd)

    def _send_content(self, fd: int, found: os.stat_result, name: bytes) -> None:
        size, at = found.st_size, 0
        if (self._known or self._noting) and size >= SAME_FROM and found.st_blocks * 512 >= size:
            digest = _digest(fd, size)
            path = joined(self._levels[-1].path, name) if self._noting else None
            if path is not None and len(self.contents) < MOST_NOTED:
                self.contents[digest] = path
            if digest in self._known:
                self._send(PIECE.pack(SAME, size) + digest)
                return
        for start, end in _filled(fd, found):
            self._send_hole(start - at)
            at = start
            while at < end:
                data = os.pread(fd, min(PIECE_LIMIT, end - at), at)
                if not data:
                    break  # it was cut meanwhile: what is missing comes as a hole
                self._send(PIECE.pack(DATA, len(data)))
                self._send(data)
                at += len(data)
        self._send_hole(size - at)

    def _send_hole(self, length: int) -> None:
        if length > 0:
            self._send(PIECE.pack(HOLE, length))

    def _row(
        self,
        code: str,
        name: bytes,
        found: os.stat_result,
        *,
        target: bytes = b"",
        back: int = 0,
        attributes: dict[str, str] | None = None,
        again: bool = False,
    ) -> None:
        size = found.st_size if code == "file" else 0
        mode, text = stat.S_IMODE(found.st_mode), name.decode("latin-1")
        row = [code, len(self._levels), text, mode, found.st_mtime_ns, size, [], target.decode("latin-1"), back, False]
        self._send_row([[*row, attributes or {}], again])
        self._count += 1

    def _send_row(self, row: list[Any]) -> None:
        text = json.dumps(row, separators=(",", ":")).encode()
        self._send(LENGTH.pack(len(text)) + text)

    def _send(self, data: bytes) -> None:
        self._digest.update(data)
        self._emit(data)


def joined(above: bytes | None, name: bytes) -> bytes | None:
    """Return the path of a name in a folder, None if it is too long to be noted."""
    path = b"/".join((above, name)) if above else name
    return None if above is None or len(path) > NOTED_PATH_BYTES else path


def _opened(here: int, name: bytes, found: os.stat_result) -> int:
    """Open a file, which may be shut to its owner."""
    try:
        return os.open(name, _FILE, dir_fd=here)
    except PermissionError:
        place = os.open(name, _PLACE, dir_fd=here)
        try:
            mode = _open_up(place, found, 0o400)
            try:
                return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            finally:
                if mode is not None:
                    os.chmod(f"/proc/self/fd/{place}", mode)
        finally:
            os.close(place)


def _open_up(place: int, found: os.stat_result, needed: int) -> int | None:
    """Let the owner at what it has shut to itself; return the mode to give back, if any. By descriptor: no link."""
    mode = stat.S_IMODE(found.st_mode)
    if mode & needed == needed or found.st_uid != os.geteuid():
        return None
    os.chmod(f"/proc/self/fd/{place}", mode | needed)
    return mode


def _digest(fd: int, size: int) -> bytes:
    digest, at = hashlib.sha256(), 0
    while at < size and (data := os.pread(fd, min(1 << 20, size - at), at)):
        digest.update(data)
        at += len(data)
    return digest.digest()


def _filled(fd: int, found: os.stat_result) -> Iterator[tuple[int, int]]:
    """Yield where a file has content, from and to; all of it unless it takes less room than its size."""
    if found.st_blocks * 512 >= found.st_size or found.st_size < _SPARSE:
        yield 0, found.st_size
        return
    at = 0
    while at < found.st_size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return  # a hole to the end
        at = min(os.lseek(fd, start, os.SEEK_HOLE), found.st_size)
        yield min(start, at), at


def _attributes(fd: int) -> dict[str, str]:
    """Return what a user has noted at a file; what a file system keeps there for itself is its own."""
    try:
        names = [name for name in os.listxattr(fd) if name.startswith("user.") and not name.startswith("user.overlay.")]
        return {os.fsencode(name).decode("latin-1"): os.getxattr(fd, name).decode("latin-1") for name in names}
    except OSError:
        return {}
