"""The controller's ends of pipes and terminals, on the event loop."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select

from skep.sandbox.sandbox import Stream

#: What one read asks for. Linux gives a pipe at most this much, so one call can empty it.
_CHUNK = 1 << 20
#: What it asks for until there proves to be more: room for a whole chunk comes from the kernel anew each time.
_FIRST_CHUNK = 1 << 16


class ReadEnd(Stream):
    """The reading end of a pipe, or the controller's side of a terminal."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._open = True
        self._size = _FIRST_CHUNK

    async def read(self) -> bytes:
        while self._open:
            try:
                chunk = os.read(self._fd, self._size)
            except BlockingIOError:
                await _ready(self._fd, reading=True)
                continue
            except OSError as error:
                # A terminal whose last user has gone answers EIO: its end of file.
                if error.errno != errno.EIO:
                    raise
                chunk = b""
            if not chunk:
                self.close()
            self._size = _CHUNK if len(chunk) >= _FIRST_CHUNK else _FIRST_CHUNK
            return chunk
        return b""

    def read_now(self) -> bytes:
        if not self._open:
            return b""
        try:
            return os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return b""

    def close(self) -> None:
        if self._open:
            self._open = False
            _forget(self._fd)
            os.close(self._fd)


class NoStream(Stream):
    """A stream with nothing in it: standard error of a process that has a terminal."""

    async def read(self) -> bytes:
        return b""

    def read_now(self) -> bytes:
        return b""


class WriteEnd:
    """The writing end of a pipe, or the controller's side of a terminal."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._open = True
        self._turn = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._open

    async def write(self, data: bytes) -> None:
        async with self._turn:
            await self._write(memoryview(data))

    async def _write(self, view: memoryview) -> None:
        while view and self._open:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                if _hung_up(self.fd):
                    return
                await _ready(self.fd, reading=False)
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO):
                    raise
                return

    def close(self) -> None:
        if self._open:
            self._open = False
            _forget(self.fd)
            os.close(self.fd)


def make_pipe(owner: tuple[int, int] | None) -> tuple[int, int]:
    """Make a pipe as large as allowed, owned by the user inside so that /dev/stdout can be opened there."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _CHUNK)
    except OSError as error:
        # A user's pipes share an allowance; past it they stay at the ordinary size.
        if error.errno not in (errno.EPERM, errno.EBUSY):
            raise
    if owner is not None:
        os.fchown(writing, *owner)
    return reading, writing


def _hung_up(fd: int) -> bool:
    """Say whether a terminal has nobody left: it takes what fits and then never has room again."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


async def _ready(fd: int, *, reading: bool) -> None:
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    add, remove = (loop.add_reader, loop.remove_reader) if reading else (loop.add_writer, loop.remove_writer)
    add(fd, _settle, waiter)
    _waiters[fd] = waiter
    try:
        await waiter
    finally:
        # Once the descriptor was closed its number may be another's already.
        if _waiters.get(fd) is waiter:
            del _waiters[fd]
            remove(fd)


#: Who waits for which descriptor in this process: closing one must wake its waiter.
_waiters: dict[int, asyncio.Future[None]] = {}


def _forget(fd: int) -> None:
    if (waiter := _waiters.pop(fd, None)) is not None:
        loop = waiter.get_loop()
        loop.remove_reader(fd)
        loop.remove_writer(fd)
        _settle(waiter)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
