"""Follow what changes below a folder, by inotify, no faster than it is asked for."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
from collections.abc import Iterator

from skep.sandbox.twin.inside.loop import READ, Loop, Outbox
from skep.sandbox.twin.inside.paths import Root
from skep.sandbox.twin.inside.wire import BOTH, DATA, STREAM, WINDOW, name_out

_EVENT = struct.Struct("=iIII")
_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _IGNORED, _IS_FOLDER = 0x4000, 0x8000, 0x40000000
_ONLY_FOLDER = 0x01000000
_MASK = _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLY_FOLDER
_FOLDER_LIMIT = 8192
_PATH_LIMIT = 4095

_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """The changes below an open folder, which it owns. Folders made later are watched too."""

    def __init__(self, loop: Loop, outbox: Outbox, number: int, root: Root, folder: int) -> None:
        self._loop = loop
        self._outbox = outbox
        self._number = number
        self._root = root
        self._folder = folder
        self._credit = WINDOW
        self._watched = False
        self._paths: dict[int, bytes] = {}
        self._fd = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            os.close(folder)
            raise OSError(ctypes.get_errno(), "inotify")

    def begin(self) -> None:
        for _ in self._enter(b""):
            pass

    def allow(self, amount: int) -> None:
        self._credit += amount
        self.settle()

    def settle(self) -> None:
        wanted = self._fd >= 0 and self._credit > 0 and not self._outbox.full
        if wanted and not self._watched:
            self._loop.watch(self._fd, READ, self._readable)
        elif self._watched and not wanted:
            self._loop.unwatch(self._fd)
        self._watched = wanted

    def release(self) -> None:
        if self._fd >= 0:
            if self._watched:
                self._loop.unwatch(self._fd)
            os.close(self._fd)
            os.close(self._folder)
            self._fd = -1
            self._watched = False

    def _readable(self) -> None:
        # Few at a time: what one read brings must not grow past the window it is sent within.
        try:
            data = os.read(self._fd, 1 << 14)
        except BlockingIOError:
            return
        changes = [_told(kind, path) for kind, path in self._events(data)]
        for start in range(0, len(changes), 64):
            payload = json.dumps(changes[start : start + 64]).encode()
            self._credit -= len(payload)
            self._outbox.say(DATA, self._number, STREAM.pack(BOTH) + payload)
        self.settle()

    def _events(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        at = 0
        while at < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            yield from self._changes(watch, mask, name)

    def _changes(self, watch: int, mask: int, name: bytes) -> Iterator[tuple[str, bytes]]:
        if mask & _OVERFLOW:
            yield "overflow", b""
        elif mask & _IGNORED:
            self._paths.pop(watch, None)
        elif (above := self._paths.get(watch)) is not None:
            path = above + b"/" + name if above else name
            yield _kind(mask), path
            if mask & _IS_FOLDER and mask & (_CREATE | _MOVED_TO):
                yield from self._enter(path)

    def _enter(self, path: bytes) -> Iterator[tuple[str, bytes]]:
        """Watch a folder with those below it, and report what was put there before the watch was in place."""
        waiting = [path]
        while waiting:
            here = waiting.pop()
            try:
                fd = self._root.open_below(self._folder, here, os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    yield "overflow", here
                continue
            try:
                found = self._add(fd, here)
            finally:
                os.close(fd)
            if found is None:
                yield "overflow", here
                return
            for name, is_folder in found:
                below = here + b"/" + name if here else name
                yield "created", below
                if is_folder:
                    waiting.append(below)

    def _add(self, folder: int, path: bytes) -> list[tuple[bytes, bool]] | None:
        """Watch one folder and return what is in it, and which of that are folders; None if there is no watch left."""
        if len(self._paths) >= _FOLDER_LIMIT:
            return None
        # The descriptor's own name cannot be swapped for another folder's, as a path could.
        watch = int(_libc.inotify_add_watch(self._fd, f"/proc/self/fd/{folder}".encode(), _MASK))
        if watch < 0:
            return None
        self._paths[watch] = path
        with os.scandir(folder) as entries:
            return [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]


def _told(kind: str, path: bytes) -> list[str]:
    """Return a change as it travels; one at a path that nobody could use is only said to be too much."""
    return [kind, name_out(path)] if len(path) <= _PATH_LIMIT else ["overflow", ""]


def _kind(mask: int) -> str:
    if mask & (_CREATE | _MOVED_TO):
        return "created"
    return "removed" if mask & (_DELETE | _MOVED_FROM) else "modified"
