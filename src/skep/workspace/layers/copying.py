"""Make a folder from what a stack shows: by copying files, or by giving them another name where that is safe.

The stack may be hostile (see `Walk`); the new folder is nobody's yet. Where the file system can share blocks between
files, a copy takes no room. A file that nobody will write again may be linked instead of copied.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skep.sandbox.claim import Owner
from skep.workspace.layers.cursor import Cursor
from skep.workspace.layers.overlay import Entry, Walk, cover, pierce

_FICLONE = 0x40049409
_NO_CLONE = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS)
_NO_LINK = (errno.EMLINK, errno.EXDEV, errno.EPERM, errno.ENAMETOOLONG, errno.ENOENT)
#: Times in inodes are coarse: a file this young could change again without showing it.
_YOUNG_NS = 50_000_000

Identity = tuple[int, int, int, int]


@dataclass(slots=True)
class Index:
    """What the files of a tree looked like when it was copied, by path; and the copy that was made then."""

    copy: Path
    files: dict[str, Identity] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Index | None:
        """Read an index; None if there is none that can be used."""
        try:
            body = json.loads(path.read_bytes())
            copy = Path(body["copy"])
            files = {name: (int(a), int(b), int(c), int(d)) for name, (a, b, c, d) in body["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return cls(copy, files) if copy.is_dir() else None

    def dump(self) -> bytes:
        return json.dumps({"copy": str(self.copy), "files": self.files}).encode()


def identity(found: os.stat_result) -> Identity:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass(slots=True)
class Copying:
    """One new folder in the making."""

    target: Path
    owner: Owner | None = None
    #: Says of a layer whether its files may be linked: they are sealed, and belong to the owner.
    linkable: Callable[[str], bool] = lambda _: False
    #: An earlier copy of the same tree, whose unchanged files are linked.
    earlier: Index | None = None
    #: Room that is shared with other trees, by the folder that holds it.
    shared: dict[str, int] = field(default_factory=dict)
    seen: dict[str, Identity] = field(default_factory=dict)
    _cursor: Cursor = field(init=False)
    _open: list[Entry] = field(default_factory=list)
    _several: dict[tuple[int, int], str] = field(default_factory=dict)
    _clones: bool = True
    _young: int = 0

    def run(self, layers: Sequence[str], *, over: Sequence[str] | None = None) -> Copying:
        """Put what the layers show into the target, an empty folder, with the marks needed above `over`."""
        self._young = time.time_ns() - _YOUNG_NS
        self._cursor = Cursor(str(self.target))
        try:
            with Walk(layers, over=over) as walk:
                for entry in walk:
                    self._put(walk, entry)
            while self._open:
                self._leave()
        finally:
            self._cursor.close()
        self._dress(Path(layers[0]).stat(), os.fspath(self.target))
        return self

    def _put(self, walk: Walk, entry: Entry) -> None:
        above, _, name = entry.path.rpartition("/")
        while (self._open[-1].path if self._open else "") != above:
            self._leave()
        match entry.kind:
            case "folder":
                os.mkdir(name, 0o700, dir_fd=self._cursor.fd)
                self._cursor.down(name)
                self._open.append(entry)
                _copy_attributes(walk.folder(), self._cursor.fd)
                if entry.opaque:
                    cover(self._cursor.fd)
            case "whiteout":
                pierce(self._cursor.fd, name)
            case _ if not self._linked(walk, entry, name):
                self._make(walk, entry, name)

    def _leave(self) -> None:
        entry = self._open.pop()
        self._cursor.up()
        self._dress(entry.stat, entry.path.rpartition("/")[2], self._cursor.fd)

    def _make(self, walk: Walk, entry: Entry, name: str) -> None:
        if entry.kind == "file":
            self._copy(walk, entry, name)
        elif entry.kind == "link":
            os.symlink(os.readlink(name, dir_fd=walk.folder()), name, dir_fd=self._cursor.fd)
        elif stat.S_ISFIFO(entry.stat.st_mode) or stat.S_ISSOCK(entry.stat.st_mode):
            os.mknod(name, stat.S_IFMT(entry.stat.st_mode) | 0o600, dir_fd=self._cursor.fd)
        else:
            return
        self._dress(entry.stat, name, self._cursor.fd)

    def _copy(self, walk: Walk, entry: Entry, name: str) -> None:
        source = walk.open(entry)
        try:
            found = os.fstat(source)
            target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._cursor.fd)
            try:
                self._fill(source, target, found.st_size)
                _copy_attributes(source, target)
            finally:
                os.close(target)
        finally:
            os.close(source)
        if found.st_nlink > 1:
            self._several[found.st_dev, found.st_ino] = entry.path
        elif found.st_ctime_ns < self._young:
            self.seen[entry.path] = identity(found)

    def _fill(self, source: int, target: int, size: int) -> None:
        if self._clones:
            try:
                fcntl.ioctl(target, _FICLONE, source)
            except OSError as error:
                if error.errno not in _NO_CLONE:
                    raise
                self._clones = False
            else:
                return
        _copy_data(source, target, size)

    def _linked(self, walk: Walk, entry: Entry, name: str) -> bool:
        """Give a file that is already there, or may be shared, another name; False if it has to be made."""
        source, folder, holder = self._source(walk, entry, name)
        if not source:
            return False
        try:
            os.link(source, name, src_dir_fd=folder, dst_dir_fd=self._cursor.fd, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            return False
        if holder:
            self.shared[holder] = self.shared.get(holder, 0) + entry.stat.st_blocks * 512
        return True

    def _source(self, walk: Walk, entry: Entry, name: str) -> tuple[str, int | None, str]:
        """Find a file to link: its path, the open folder that it is in, and the tree that it is shared with."""
        found = entry.stat
        if first := self._several.get((found.st_dev, found.st_ino)):
            return f"{self.target}/{first}", None, ""
        if self.linkable(entry.layer):
            return name, walk.folder(), entry.layer
        if self.earlier and entry.kind == "file" and self.earlier.files.get(entry.path) == identity(found):
            self.seen[entry.path] = identity(found)
            return f"{self.earlier.copy}/{entry.path}", None, str(self.earlier.copy)
        return "", None, ""

    def _dress(self, found: os.stat_result, name: str, folder: int | None = None) -> None:
        """Give what was made the owner, mode and time that it is to have."""
        if self.owner is not None:
            os.chown(name, *self.owner, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISLNK(found.st_mode):
            os.chmod(name, stat.S_IMODE(found.st_mode), dir_fd=folder)
        os.utime(name, ns=(found.st_atime_ns, found.st_mtime_ns), dir_fd=folder, follow_symlinks=False)


def _copy_data(source: int, target: int, size: int) -> None:
    """Copy a file's bytes and leave its holes as they are."""
    at = 0
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        at = min(os.lseek(source, start, os.SEEK_HOLE), size)
        os.lseek(target, start, os.SEEK_SET)
        while start < at:
            done = os.sendfile(target, source, start, at - start)
            if done == 0:
                break
            start += done
    os.ftruncate(target, size)


def _copy_attributes(source: int, target: int) -> None:
    for name in os.listxattr(source):
        # The overlay's own describe one stack and mean nothing in another; the marks are made anew.
        if name.startswith("user.") and not name.startswith("user.overlay."):
            os.setxattr(target, name, os.getxattr(source, name))


def flush(folder: Path) -> None:
    """Wait until everything on the file system of a folder is on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(folder))
    finally:
        os.close(fd)
