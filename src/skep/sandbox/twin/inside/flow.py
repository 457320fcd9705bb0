"""Bytes on their way: out of a descriptor by credit, and into one as fast as it takes them."""

from __future__ import annotations

import collections
import os
import stat
from collections.abc import Callable

from skep.sandbox.twin.inside.loop import READ, WRITE, Loop, Outbox
from skep.sandbox.twin.inside.wire import CLOSED, COUNTED, DATA, END, PIECE, STREAM, TAKEN, WINDOW


class Source:
    """Reads a descriptor, which it owns, and no further than there is credit for."""

    def __init__(self, loop: Loop, outbox: Outbox, number: int, stream: int, fd: int) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._outbox = outbox
        self._number = number
        self._stream = stream
        self._head = STREAM.pack(stream)
        self._credit = WINDOW
        #: A file on a disk is always ready, and no selector takes it.
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._watched = False
        self.fd = fd
        #: Called before anything is read, so that what was said elsewhere goes first.
        self.before: Callable[[], None] | None = None
        self.settle()

    def allow(self, amount: int) -> None:
        self._credit += amount
        self.settle()

    def settle(self) -> None:
        """Listen or not, as things are."""
        wanted = self.fd >= 0 and self._credit > 0 and not self._outbox.full
        if self._is_file:
            if wanted and not self._watched:
                self._watched = True
                self._loop.later(0, self._next_of_file)
        elif wanted and not self._watched:
            self._watched = True
            self._loop.watch(self.fd, READ, self._readable)
        elif self._watched and not wanted:
            self._watched = False
            self._loop.unwatch(self.fd)

    def drain(self, extra: int) -> None:
        """Pass on what is there now, at most so much more than there is credit for."""
        self._credit += extra
        while self.fd >= 0 and self._credit > 0 and self._pass_on():
            pass
        self._credit -= extra
        self.settle()

    def close(self) -> None:
        if self.fd >= 0:
            if self._watched and not self._is_file:
                self._loop.unwatch(self.fd)
            self._watched = False
            os.close(self.fd)
            self.fd = -1

    def _next_of_file(self) -> None:
        self._watched = False
        if self.fd >= 0:
            self._pass_on()
            self.settle()

    def _readable(self) -> None:
        if self.before is not None:
            self.before()
        self._pass_on()
        self.settle()

    def _pass_on(self) -> bool:
        if self.fd < 0:
            return False
        try:
            piece = os.read(self.fd, min(self._credit, PIECE))
        except BlockingIOError:
            return False
        except OSError:
            # A terminal whose last user has gone answers EIO, a connection that broke ECONNRESET: their end.
            if self._is_file:
                self.close()
                self._outbox.say(CLOSED, self._number)
                return False
            piece = b""
        if piece:
            self._credit -= len(piece)
            self._outbox.say(DATA, self._number, self._head + piece)
            return True
        self.finish()
        return False

    def finish(self) -> None:
        """Come to the end."""
        if self.fd >= 0:
            self.close()
            self._outbox.say(END, self._number, self._head)


class Sink:
    """Writes to a descriptor, which it owns, and tells how much of what came has been taken."""

    def __init__(self, loop: Loop, outbox: Outbox, number: int, fd: int, *, finish: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._outbox = outbox
        self._number = number
        self._finish = finish
        self._waiting: collections.deque[bytes] = collections.deque()
        self._ending = False
        self._watched = False
        self.fd = fd

    def put(self, data: bytes) -> None:
        if self.fd >= 0:
            self._waiting.append(data)
            if not self._watched:
                self._write()

    def end(self) -> None:
        """Close once everything has been written."""
        self._ending = True
        if not self._waiting and self.fd >= 0:
            self._finished()

    def close(self) -> None:
        """Take nothing more, and say so."""
        if self.fd >= 0:
            self._outbox.say(CLOSED, self._number)
            self.drop()

    def drop(self) -> None:
        """Take nothing more."""
        if self.fd >= 0:
            self._watch(False)
            os.close(self.fd)
            self.fd = -1
            self._waiting.clear()

    def _finished(self) -> None:
        self._watch(False)
        self._finish()

    def _write(self) -> None:
        taken = 0
        try:
            while self._waiting and taken < WINDOW:
                written = os.write(self.fd, self._waiting[0])
                taken += written
                if written == len(self._waiting[0]):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = self._waiting[0][written:]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if taken:
            self._outbox.say(TAKEN, self._number, COUNTED.pack(taken))
        self._watch(bool(self._waiting))
        if self._ending and not self._waiting:
            self._finished()

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watched:
            self._loop.watch(self.fd, WRITE, self._write)
        elif self._watched and not wanted:
            self._loop.unwatch(self.fd)
        self._watched = wanted
