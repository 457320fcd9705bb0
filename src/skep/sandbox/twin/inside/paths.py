"""Open what is at a path as a command inside would, and nothing that only looks like a file."""

from __future__ import annotations

import ctypes
import errno
import os
import posixpath
import stat
import struct
from typing import NoReturn

_OPENAT2 = 437
_NO_MAGIC_LINKS, _NO_SYMLINKS, _BENEATH, _IN_ROOT = 0x02, 0x04, 0x08, 0x10
_PROC = 0x9FA0  # what statfs(2) says of procfs
_LINKS = 40
_PATH_LIMIT = 4095

_libc = ctypes.CDLL(None, use_errno=True)


class NotUsable(Exception):
    """What is at the path is not for this; `why` is one of `folder`, `special`, `linked`, `proc`, `large`, `many`."""

    def __init__(self, why: str, detail: int = 0) -> None:
        super().__init__(why)
        self.why = why
        self.detail = detail


class Root:
    """The root folder, and the home that relative paths start from."""

    def __init__(self, home: bytes) -> None:
        self.fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.home = home
        self._has_openat2 = True

    def inside(self, path: bytes) -> bytes:
        """Return a path relative to the root. Dots are folded by text, as a person reads the path."""
        if len(path) > _PATH_LIMIT:
            _raise(errno.ENAMETOOLONG)
        whole = posixpath.normpath(posixpath.join(b"/workspace", path))
        if whole == b"/workspace" or whole.startswith(b"/workspace/"):
            whole = posixpath.normpath(self.home + whole[len(b"/workspace") :])
        return whole.lstrip(b"/") or b"."

    def open(self, inside: bytes, flags: int) -> int:
        """Open a path below the root, following links as inside."""
        return self.open_at(self.fd, inside, flags, _IN_ROOT)

    def open_below(self, folder: int, path: bytes, flags: int) -> int:
        """Open a path below a folder, following no link."""
        return self.open_at(folder, path, flags, _BENEATH | _NO_SYMLINKS)

    def open_at(self, folder: int, path: bytes, flags: int, resolve: int) -> int:
        if self._has_openat2:
            try:
                return _openat2(folder, path or b".", flags, resolve)
            except OSError as error:
                # A system call filter may not know it and say that it is not permitted.
                if error.errno not in (errno.ENOSYS, errno.EPERM) or self._openat2_works():
                    raise
                self._has_openat2 = False
        return _Walk(folder, follow=not resolve & _NO_SYMLINKS).open(path or b".", flags)

    def _openat2_works(self) -> bool:
        try:
            os.close(_openat2(self.fd, b".", os.O_PATH, _IN_ROOT))
        except OSError:
            return False
        return True

    def open_regular(self, path: bytes, flags: int, *, sole: bool = False) -> int:
        """Open a regular file: what it is gets settled on a descriptor that opens nothing."""
        probe = self.open(self.inside(path), os.O_PATH)
        try:
            found = os.fstat(probe)
            require_regular(found, sole=sole)
            _require_stored(probe)
            return _reopened(probe, found, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        finally:
            os.close(probe)


def require_regular(found: os.stat_result, *, sole: bool) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise NotUsable("folder")
    if not stat.S_ISREG(found.st_mode):
        raise NotUsable("special")
    if sole and found.st_nlink > 1:
        raise NotUsable("linked")


def _require_stored(fd: int) -> None:
    room = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, room) != 0 or ctypes.c_long.from_buffer(room).value == _PROC:
        raise NotUsable("proc")


def _reopened(probe: int, found: os.stat_result, flags: int) -> int:
    fd = os.open(f"/proc/self/fd/{probe}", flags)
    again = os.fstat(fd)
    if (again.st_dev, again.st_ino) != (found.st_dev, found.st_ino):
        os.close(fd)
        _raise(errno.ESTALE)
    return fd


def _openat2(folder: int, path: bytes, flags: int, resolve: int) -> int:
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve | _NO_MAGIC_LINKS)
    code = errno.EAGAIN
    for _ in range(32):
        fd = int(_libc.syscall(_OPENAT2, folder, path, how, ctypes.c_size_t(len(how))))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: a rename raced the look-up
            break
    raise OSError(code, os.strerror(code))


class _Walk:
    """The same by hand, for kernels without openat2: one name at a time, each link read and never followed blindly."""

    def __init__(self, root: int, *, follow: bool) -> None:
        self._root = root
        self._follow = follow
        self._links = 0

    def open(self, path: bytes, flags: int) -> int:
        """Open a path; what the last name is a link to is opened too."""
        trail = [os.dup(self._root)]
        names = [name for name in reversed(path.split(b"/")) if name not in (b"", b".")]
        try:
            while names:
                name = names.pop()
                if name == b"..":
                    if len(trail) > 1:
                        os.close(trail.pop())
                    continue
                step = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=trail[-1])
                trail.append(step)
                if stat.S_ISLNK(os.fstat(step).st_mode):
                    self._turn(trail, names, name)
                elif names and not stat.S_ISDIR(os.fstat(step).st_mode):
                    _raise(errno.ENOTDIR)
            return _opened(trail[-1], flags)
        finally:
            for fd in trail:
                os.close(fd)

    def _turn(self, trail: list[int], names: list[bytes], name: bytes) -> None:
        """Go where a link leads, from the root if it says so; a link of procfs leads out of all paths."""
        os.close(trail.pop())
        self._links += 1
        room = ctypes.create_string_buffer(256)
        magic = _libc.fstatfs(trail[-1], room) != 0 or ctypes.c_long.from_buffer(room).value == _PROC
        if not self._follow or self._links > _LINKS or magic:
            _raise(errno.ELOOP)
        target = os.readlink(name, dir_fd=trail[-1])
        if target.startswith(b"/"):
            while len(trail) > 1:
                os.close(trail.pop())
        names.extend(part for part in reversed(target.split(b"/")) if part not in (b"", b"."))


def _opened(place: int, flags: int) -> int:
    found = os.fstat(place)
    if flags & os.O_DIRECTORY and not stat.S_ISDIR(found.st_mode):
        _raise(errno.ENOTDIR)
    if flags & os.O_PATH:
        return os.dup(place)
    if stat.S_ISDIR(found.st_mode):
        return os.open(".", flags | os.O_CLOEXEC, dir_fd=place)
    return _reopened(place, found, flags | os.O_CLOEXEC)


def _raise(code: int) -> NoReturn:
    raise OSError(code, os.strerror(code))
