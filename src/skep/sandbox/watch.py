"""Follow what changes below a folder, by inotify."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Literal, Self

from skep.errors import LimitReached
from skep.sandbox.files import Change

_EVENT = struct.Struct("=iIII")
_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _IGNORED, _IS_FOLDER = 0x4000, 0x8000, 0x40000000
_ONLY_FOLDER = 0x01000000
_MASK = _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLY_FOLDER
_FOLDER_LIMIT = 8192

_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """The changes below an open folder, which it owns, until an event. Folders made later are watched too."""

    def __init__(self, folder_fd: int, *, until: asyncio.Event | None = None) -> None:
        self._root = folder_fd
        self._until = until or asyncio.Event()
        self._fd = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            os.close(folder_fd)
            raise LimitReached("this user has no inotify watches left", hint="raise fs.inotify.max_user_instances")
        self._paths: dict[int, str] = {}

    async def __aenter__(self) -> Self:
        for _ in self._enter(""):
            pass
        return self

    async def __aexit__(self, *_: object) -> None:
        os.close(self._fd)
        os.close(self._root)

    async def __aiter__(self) -> AsyncIterator[Change]:
        while await self._readable():
            for change in self._drain():
                yield change

    async def _readable(self) -> bool:
        """Wait for changes; False once there will be none."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        waits = [asyncio.ensure_future(event.wait()) for event in (ready, self._until)]
        loop.add_reader(self._fd, ready.set)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._fd)
            for wait in waits:
                wait.cancel()
        return ready.is_set()

    def _drain(self) -> Iterator[Change]:
        data = os.read(self._fd, 1 << 16)
        at = 0
        while at < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, at)
            name = os.fsdecode(data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0"))
            at += _EVENT.size + length
            yield from self._changes(watch, mask, name)

    def _changes(self, watch: int, mask: int, name: str) -> Iterator[Change]:
        if mask & _OVERFLOW:
            yield Change("overflow", "")
        elif mask & _IGNORED:
            self._paths.pop(watch, None)
        elif (above := self._paths.get(watch)) is not None:
            path = f"{above}/{name}" if above else name
            yield Change(_kind(mask), path)
            if mask & _IS_FOLDER and mask & (_CREATE | _MOVED_TO):
                yield from self._enter(path)

    def _enter(self, path: str) -> Iterator[Change]:
        """Watch a folder with those below it, and report what was put there before the watch was in place."""
        waiting = [path]
        while waiting:
            here = waiting.pop()
            try:
                fd = _open_below(self._root, here)
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    yield Change("overflow", here)
                continue
            try:
                found = self._add(fd, here)
            finally:
                os.close(fd)
            if found is None:
                yield Change("overflow", here)
                return
            for name, is_folder in found:
                below = f"{here}/{name}" if here else name
                yield Change("created", below)
                if is_folder:
                    waiting.append(below)

    def _add(self, folder_fd: int, path: str) -> list[tuple[str, bool]] | None:
        """Watch one folder and return what is in it, and which of that are folders; None if there is no watch left."""
        if len(self._paths) >= _FOLDER_LIMIT:
            return None
        # The descriptor's own name cannot be swapped for another folder's, as a path could.
        watch = int(_libc.inotify_add_watch(self._fd, f"/proc/self/fd/{folder_fd}".encode(), _MASK))
        if watch < 0:
            return None
        self._paths[watch] = path
        with os.scandir(folder_fd) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _open_below(folder_fd: int, path: str) -> int:
    from skep.sandbox.openat2 import BENEATH, NO_SYMLINKS, openat2

    return openat2(folder_fd, path, os.O_RDONLY | os.O_DIRECTORY, resolve=BENEATH | NO_SYMLINKS)


def _kind(mask: int) -> Literal["created", "modified", "removed"]:
    if mask & (_CREATE | _MOVED_TO):
        return "created"
    return "removed" if mask & (_DELETE | _MOVED_FROM) else "modified"
