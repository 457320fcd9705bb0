"""Files in a folder that an agent can write to, reached from the host.

One `Tree` serves a live sandbox (its root is the sandbox's own root folder, so every path means what it means
inside) and a workspace at rest (its root is the folder on the host). Both are hostile ground: look-ups are confined
by `openat2`, only regular files are opened and never through a device or a FIFO, and writes replace.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import posixpath
import secrets
import stat
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from skep.errors import (
    Conflict,
    Defect,
    Denied,
    InvalidRequest,
    LimitReached,
    NotFound,
    SandboxLost,
    SkepError,
    StorageFull,
    Unavailable,
    WorkspaceBusy,
)
from skep.sandbox.census import Census, Usage
from skep.sandbox.claim import claim
from skep.sandbox.erase import erase_at
from skep.sandbox.files import READ_LIMIT_BYTES, Change, Entry, Kind
from skep.sandbox.openat2 import BENEATH, IN_ROOT, openat2

P = ParamSpec("P")
T = TypeVar("T")

_libc = ctypes.CDLL(None)
#: How often it is looked whether everybody has become still.
_STILL_S = 0.0005
_PIECE = 4 << 20
_LIST_LIMIT = 100_000
_PATH_LIMIT = 4095
_PROC = 0x9FA0  # what statfs(2) says of procfs


@dataclass(slots=True)
class Tree:
    """Implements `Files` over a folder descriptor, which it owns.

    `base` is the folder, seen from the root, that relative paths start from. `owner` is who made files belong to,
    when the controller is root. With `at_rest`, a link that leads out is refused instead of read from the root.
    `lost` is set when the sandbox is gone: then every call, and every wait, is `SandboxLost`.
    """

    root_fd: int
    base: str = "/workspace"
    owner: tuple[int, int] | None = None
    at_rest: bool = False
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    _home: tuple[int, int] | None = None
    _users: int = 0
    _drafts: int = 0
    _closed: bool = False
    #: Calls that have been let in, and whether any are; calls wait here and not in threads, of which there are few.
    _calls: int = 0
    _let_in: asyncio.Event = field(default_factory=asyncio.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._let_in.set()
        if not self.at_rest:
            self._home = self._base_identity()

    @classmethod
    def at(cls, folder: str) -> Tree:
        """Open a workspace folder at rest, made if it is missing; its paths are those of the sandbox to be."""
        fd, owner = claim(folder)
        return cls(fd, owner=owner, at_rest=True)

    def close(self) -> None:
        """Close the folder as soon as nobody is at work in it."""
        with self._lock:
            self._closed = True
            self._close_unused()

    async def read(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        return await self._call(self._read, path, limit_bytes)

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        fd = await self._own(os.close, self._open_regular, path, os.O_RDONLY)
        try:
            while piece := await asyncio.to_thread(os.read, fd, _PIECE):
                yield piece
        finally:
            os.close(fd)

    async def write(self, path: str, data: bytes | str | AsyncIterable[bytes], *, mode: int | None = None) -> None:
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes):
            await self._call(self._write, path, data, mode)
            return
        draft = await self._own(self._discard, self._draft, path)
        self._drafts += 1
        try:
            async for piece in data:
                with _explained(path):
                    await asyncio.to_thread(_write_all, draft.fd, piece)
            await self._call(self._publish, draft, path, mode)
        finally:
            self._drafts -= 1
            await asyncio.shield(asyncio.to_thread(self._discard, draft))

    async def append(self, path: str, data: bytes | str) -> None:
        await self._call(self._append, path, data.encode() if isinstance(data, str) else data)

    async def list(self, path: str = ".") -> list[Entry]:
        return sorted(await self._call(self._list, path), key=lambda entry: entry.name)

    async def stat(self, path: str) -> Entry:
        return await self._call(self._stat, path)

    async def move(self, source: str, target: str) -> None:
        await self._call(self._move, source, target)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        await self._call(self._remove, path, recursive)

    async def mkdir(self, path: str) -> None:
        await self._call(self._mkdir, path)

    async def watch(self, path: str = ".") -> AsyncIterator[Change]:
        from skep.sandbox.watch import Watch

        def opened() -> int:
            with _explained(path):
                return self._open(self._inside(path), os.O_RDONLY | os.O_DIRECTORY)

        async with Watch(await self._call(opened), until=self.lost) as changes:
            async for change in changes:
                yield change
        raise _gone()

    async def _call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do file work in a thread, as the sandbox's own user."""

        def done() -> T:
            with self._held(), acting_as(self.owner):
                return work(*args, **kwargs)

        return await self._in_turn(done)

    async def _in_turn(self, work: Callable[[], T]) -> T:
        """Do work in a thread, unless everybody has to keep still: then first wait until that is over."""
        while not self._let_in.is_set():
            await self._let_in.wait()
        self._calls += 1
        try:
            return await asyncio.to_thread(work)
        finally:
            self._calls -= 1

    async def _own(self, release: Callable[[T], None], work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do file work whose result has to be released, also if the caller is cancelled before it has it."""
        task = asyncio.ensure_future(self._call(work, *args, **kwargs))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: _release(done, release))
            raise

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep the root open, and tell a sandbox that is gone from a file that is not there."""
        with self._lock:
            if self._closed or self.lost.is_set():
                raise _gone()
            self._users += 1
        try:
            yield
        except (SkepError, OSError) as error:
            if self._home is not None and self._base_identity() != self._home:
                raise _gone() from error
            raise
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Let nobody work on the files meanwhile: the folder below them is about to be another."""
        if self._drafts:
            raise WorkspaceBusy("a file is being written from outside", hint="try again when it is there")
        self._let_in.clear()
        try:
            while self._calls or self._users:  # noqa: ASYNC110 - threads come to their end here, which tell nobody
                await asyncio.sleep(_STILL_S)
            yield
        finally:
            self._home = self._base_identity()
            self._let_in.set()

    def _close_unused(self) -> None:
        if self._closed and self._users == 0 and self.root_fd >= 0:
            os.close(self.root_fd)
            self.root_fd = -1

    def _base_identity(self) -> tuple[int, int] | None:
        """Say which folder relative paths start from. The mount there goes with the sandbox."""
        try:
            with _closing(self._open(self._inside("."), os.O_PATH)) as base:
                found = os.fstat(base)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _discard(self, draft: Draft) -> None:
        with acting_as(self.owner):
            draft.discard()

    def room(self) -> Usage:
        """Return how much the file system of the workspace has left."""
        with self._held(), _explained("."), _closing(self._open(self._inside("."), os.O_PATH)) as folder:
            found = os.statvfs(folder)
        return Usage(found.f_bavail * found.f_frsize, found.f_favail)

    async def measure(self) -> Usage:
        """Measure what the workspace holds, as this process: the sandbox's user can shut a folder to itself."""

        def counted(_: int) -> Usage:
            with _explained("."), _closing(self._open(self._inside("."), os.O_PATH)) as top:
                return Census.take(top)

        return await self.examine(counted)

    async def examine(self, work: Callable[[int], T]) -> T:
        """Do work on the root descriptor in a thread, as this process."""

        def done() -> T:
            with self._held():
                return work(self.root_fd)

        return await self._in_turn(done)

    def _inside(self, path: str) -> str:
        """Return the path relative to the root descriptor, or refuse it."""
        if "\0" in path:
            raise InvalidRequest("a path contains a NUL character", hint="remove the character")
        try:
            length = len(os.fsencode(path))
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"a path is not valid text: {error.reason}", hint="use UTF-8 text") from error
        if length > _PATH_LIMIT:
            raise InvalidRequest(f"a path of {len(path)} characters is too long", hint="use a shorter one")
        # Dots are folded by text, as a person reads the path; what is left is looked up by the kernel.
        whole = posixpath.normpath(posixpath.join(self.base, path))
        if not self.at_rest:
            return whole.lstrip("/") or "."
        if whole != self.base and not whole.startswith(self.base + "/"):
            raise InvalidRequest(
                f"{path!r} is not below {self.base}",
                hint="a sandbox that is not running has only its workspace",
            )
        return whole[len(self.base) + 1 :] or "."

    def _open(self, inside: str, flags: int) -> int:
        return openat2(self.root_fd, inside, flags, resolve=BENEATH if self.at_rest else IN_ROOT)

    def _open_regular(self, path: str, flags: int, *, sole: bool = False) -> int:
        """Open a regular file: what it is gets settled on a descriptor that opens nothing."""
        with _explained(path):
            probe = self._open(self._inside(path), os.O_PATH)
            try:
                _require_regular(os.fstat(probe), path, sole=sole)
                _require_stored(probe, path)
                return os.open(f"/proc/self/fd/{probe}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            finally:
                os.close(probe)

    def _read(self, path: str, limit_bytes: int) -> bytes:
        fd = self._open_regular(path, os.O_RDONLY)
        with _explained(path), _closing(fd):
            size = os.fstat(fd).st_size
            if size > limit_bytes:
                raise LimitReached(
                    f"{path!r} has {size} bytes, more than the {limit_bytes} that are read at once",
                    hint="stream it instead",
                )
            return _read_up_to(fd, min(limit_bytes, max(size, _PIECE)))

    def _write(self, path: str, data: bytes, mode: int | None) -> None:
        draft = self._draft(path)
        try:
            with _explained(path):
                _write_all(draft.fd, data)
            self._publish(draft, path, mode)
        finally:
            draft.discard()

    def _draft(self, path: str) -> Draft:
        folder, name = posixpath.split(self._inside(path))
        if name in ("", "."):
            raise InvalidRequest(f"{path!r} is a folder", hint="name a file in it")
        with _explained(path):
            parent = self._make_folders(folder)
            try:
                return Draft.begin(parent, name)
            except BaseException:
                os.close(parent)
                raise

    def _publish(self, draft: Draft, path: str, mode: int | None) -> None:
        with _explained(path):
            os.fchmod(draft.fd, _mode_at(draft.parent, draft.name) if mode is None else mode & 0o777)
            draft.publish()

    def _append(self, path: str, data: bytes) -> None:
        try:
            fd = self._open_regular(path, os.O_WRONLY | os.O_APPEND, sole=True)
        except NotFound:
            self._write(path, data, None)
            return
        with _explained(path), _closing(fd):
            _write_all(fd, data)

    def _list(self, path: str) -> Iterable[Entry]:
        entries: deque[Entry] = deque()
        with (
            _explained(path),
            _closing(self._open(self._inside(path), os.O_RDONLY | os.O_DIRECTORY)) as folder,
        ):
            for found in os.scandir(folder):
                name = found.name
                if len(entries) >= _LIST_LIMIT:
                    raise LimitReached(
                        f"{path!r} has more than {_LIST_LIMIT} entries", hint="list it with a command inside"
                    )
                with contextlib.suppress(FileNotFoundError):
                    entries.append(_describe(folder, name))
        return entries

    def _stat(self, path: str) -> Entry:
        folder, name = posixpath.split(self._inside(path))
        with _explained(path), _closing(self._open(folder, os.O_PATH | os.O_DIRECTORY)) as parent:
            return _describe(parent, name or ".")

    def _move(self, source: str, target: str) -> None:
        from_folder, from_name = posixpath.split(self._inside(source))
        to_folder, to_name = posixpath.split(self._inside(target))
        with (
            _explained(source),
            _closing(self._open(from_folder, os.O_PATH | os.O_DIRECTORY)) as from_fd,
            _closing(self._make_folders(to_folder)) as to_fd,
        ):
            os.rename(from_name, to_name, src_dir_fd=from_fd, dst_dir_fd=to_fd)

    def _remove(self, path: str, recursive: bool) -> None:
        folder, name = posixpath.split(self._inside(path))
        with _explained(path), _closing(self._open(folder, os.O_PATH | os.O_DIRECTORY)) as parent:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=parent)
            elif recursive:
                erase_at(parent, name)
            else:
                os.rmdir(name, dir_fd=parent)

    def _make_folders(self, inside: str) -> int:
        """Open a folder for `*at` calls, making what is missing of the way to it."""
        flags = os.O_PATH | os.O_DIRECTORY
        with contextlib.suppress(FileNotFoundError):
            return self._open(inside, flags)
        parts = inside.split("/")
        for depth, name in enumerate(parts, 1):
            with (
                _closing(self._open("/".join(parts[: depth - 1]), flags)) as parent,
                contextlib.suppress(FileExistsError),
            ):
                os.mkdir(name, 0o755, dir_fd=parent)
        return self._open(inside, flags)

    def _mkdir(self, path: str) -> None:
        with _explained(path):
            os.close(self._make_folders(self._inside(path)))


@dataclass(slots=True)
class Draft:
    """A file that is being written beside the one it will replace.

    Where the file system can, it has no name until it is whole: nobody inside sees it, and a controller that dies
    leaves nothing of it.
    """

    parent: int
    name: str
    hidden: str
    fd: int
    named: bool = False

    @classmethod
    def begin(cls, parent: int, name: str) -> Draft:
        hidden = f".skep-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CLOEXEC
        try:
            return cls(parent, name, hidden, os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=parent))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return cls(parent, name, hidden, os.open(hidden, flags, 0o600, dir_fd=parent), named=True)

    def publish(self) -> None:
        """Put the draft in the place of what is there."""
        if not self.named:
            # A link cannot replace a file, so the draft gets a name of its own first.
            os.link(f"/proc/self/fd/{self.fd}", self.hidden, dst_dir_fd=self.parent, follow_symlinks=True)
        os.rename(self.hidden, self.name, src_dir_fd=self.parent, dst_dir_fd=self.parent)

    def discard(self) -> None:
        """Remove the draft unless it has been published, and close it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.hidden, dir_fd=self.parent)
        os.close(self.fd)
        os.close(self.parent)


@contextmanager
def acting_as(owner: tuple[int, int] | None) -> Iterator[None]:
    """Touch files as another user, in this thread alone.

    Without it a controller that is root would read and write with root's rights, and could not make files at all in
    a sandbox's own /tmp, where root has no name.
    """
    if owner is None:
        yield
        return
    uid, gid = owner
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    try:
        if _libc.setfsuid(-1) != uid:
            raise Defect(f"cannot act as user {uid}")
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())


def _release(done: asyncio.Future[T], release: Callable[[T], None]) -> None:
    if not done.cancelled() and done.exception() is None:
        release(done.result())


def _gone() -> SandboxLost:
    return SandboxLost("the sandbox is gone", hint="resolve the session or create a new sandbox")


def _mode_at(parent: int, name: str) -> int:
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return 0o644
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    return stat.S_IMODE(found.st_mode) & 0o777 if stat.S_ISREG(found.st_mode) else 0o644


def _require_regular(found: os.stat_result, path: str, *, sole: bool) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise InvalidRequest(f"{path!r} is a folder", hint="list it, or name a file in it")
    if not stat.S_ISREG(found.st_mode):
        raise Denied(f"{path!r} is a {_kind(found.st_mode)} file: only regular files are opened")
    if sole and found.st_nlink > 1:
        raise Denied(f"{path!r} has other names (hard links)", hint="write it anew instead of appending to it")


def _require_stored(fd: int, path: str) -> None:
    """Refuse what only looks like a file: /proc/sys asks for the real user, which may be root here."""
    found = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, found) != 0 or ctypes.c_long.from_buffer(found).value == _PROC:
        raise Denied(f"{path!r} is in /proc: only stored files are opened", hint="use a command inside")


def _describe(parent: int, name: str) -> Entry:
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    kind = _kind(found.st_mode)
    target = os.readlink(name, dir_fd=parent) if kind == "link" else None
    return Entry(name, kind, found.st_size, stat.S_IMODE(found.st_mode), found.st_mtime, target)


def _kind(mode: int) -> Kind:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "other"


def _read_up_to(fd: int, size: int) -> bytes:
    pieces, left = [], size
    while left and (piece := os.read(fd, min(left, 64 << 20))):
        pieces.append(piece)
        left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turn the kernel's answer about a path into ours."""
    try:
        yield
    except OSError as error:
        raise meaning(error, path) from error


def meaning(error: OSError, path: str) -> SkepError:
    """Put the kernel's answer about a path into our words."""
    shown = path if len(path) <= 200 else path[:200] + "…"
    reason = os.strerror(error.errno or 0)
    match error.errno:
        case errno.ENOENT:
            return NotFound(f"there is nothing at {shown!r}", hint="list the folder to see what is there")
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.EXDEV | errno.ELOOP:
            return Denied(f"{shown!r} may not be used: {reason}")
        case errno.ENOSPC | errno.EDQUOT:
            return StorageFull(f"no room left for {shown!r}", hint="remove files or raise the disk limit")
        case errno.EEXIST | errno.ENOTEMPTY | errno.EBUSY:
            return Conflict(f"{shown!r}: {reason}")
        case errno.ENOTDIR | errno.EISDIR | errno.ENAMETOOLONG | errno.EINVAL | errno.ENXIO:
            return InvalidRequest(f"{shown!r}: {reason}")
        case _:
            return Unavailable(f"{shown!r}: {reason}")
