"""A command that the twin has started."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable

from skep.sandbox.twin.inside.birth import Nursery, Refused, Spawn, open_terminal, resize, terminals_hang_up
from skep.sandbox.twin.inside.flow import Sink, Source
from skep.sandbox.twin.inside.loop import READ, Loop, Outbox
from skep.sandbox.twin.inside.wire import (
    AT_FORK,
    BOTH,
    CHANNEL,
    COUNTED,
    ERR,
    EXIT,
    EXITED,
    NOTHING,
    OUT,
    PIPE,
    REFUSAL,
    REFUSED,
    STARTED,
    TERMINAL,
)

#: A neighbour may halt a child on its way to becoming a command: it is set going again, for so long.
_NUDGE_S, _NUDGES = 0.02, 100
#: What a pipe holds: as much of a command that has ended is passed on whether or not there is credit for it.
_PIPE_BYTES = 1 << 16
#: More than a terminal holds.
_TERMINAL_BYTES = 1 << 18


class Program:
    """One command, from its fork to its end; and its streams, which may outlive it."""

    def __init__(self, loop: Loop, outbox: Outbox, number: int) -> None:
        self._loop = loop
        self._outbox = outbox
        self.number = number
        self._hearing = -1
        self._nudges = 0
        self._master = -1
        self.sources: dict[int, Source] = {}
        self.sink: Sink | None = None
        self.pid = 0
        self.started = False
        self.ended = False
        #: Nobody wants its streams any more.
        self.released = False
        #: What is left of its group goes when it does.
        self.doomed = False
        #: Which of the limits that the twin holds ended it, and who knows if that is not known yet.
        self.limit = 0
        self.judge: Callable[[], int] | None = None
        #: Called once it runs.
        self.begun: Callable[[], None] | None = None

    def start(self, nursery: Nursery, spawn: Spawn, *, input: int, size: tuple[int, int]) -> None:
        theirs: list[int] = []
        try:
            fds = self._terminal(theirs, size) if input == TERMINAL else self._pipes(theirs, input)
            self.pid, self._hearing = nursery.fork(spawn, fds, terminal=input == TERMINAL)
        except OSError as error:
            self.release()
            raise Refused(error.errno or errno.EMFILE, AT_FORK) from error
        except Refused:
            self.release()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self._loop.watch(self._hearing, READ, self.hear)
        self._loop.later(_NUDGE_S, self._nudge)

    def _pipes(self, theirs: list[int], input: int) -> tuple[int, int, int]:
        given = self._input(input)
        theirs.append(given)
        for stream in (OUT, ERR):
            reading, writing = os.pipe2(os.O_CLOEXEC)
            theirs.append(writing)
            self.sources[stream] = Source(self._loop, self._outbox, self.number, stream, reading)
        return given, theirs[1], theirs[2]

    def _input(self, input: int) -> int:
        if input == NOTHING:
            return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        if input == PIPE:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            self.sink = Sink(self._loop, self._outbox, self.number, writing, finish=self._close_input)
            return reading
        assert input == CHANNEL
        ours, given = socket.socketpair()
        self._carry(ours)
        return given.detach()

    def _carry(self, ours: socket.socket) -> None:
        """Take a socket for both directions."""
        fd = ours.detach()
        writing = os.dup(fd)
        source = Source(self._loop, self._outbox, self.number, BOTH, fd)
        source.before = self._print_first
        self.sources[BOTH] = source
        self.sink = Sink(self._loop, self._outbox, self.number, writing, finish=self._shut)

    def _terminal(self, theirs: list[int], size: tuple[int, int]) -> tuple[int, int, int]:
        master, slave = open_terminal(*size)
        theirs.append(slave)
        self._master = master
        self.sink = Sink(self._loop, self._outbox, self.number, os.dup(master), finish=self._close_input)
        self.sources[OUT] = Source(self._loop, self._outbox, self.number, OUT, master)
        return slave, slave, slave

    def hear(self) -> None:
        """Learn whether the child has become the command."""
        if self._hearing < 0:
            return
        word = os.read(self._hearing, REFUSAL.size)
        self._loop.unwatch(self._hearing)
        os.close(self._hearing)
        self._hearing = -1
        if word:
            self._refuse(word)
        else:
            self.started = True
            self._outbox.say(STARTED, self.number, COUNTED.pack(self.pid))
            if self.begun is not None:
                self.begun()

    def _refuse(self, word: bytes) -> None:
        self.ended = True
        self.release()
        self._outbox.say(REFUSED, self.number, word)

    def _nudge(self) -> None:
        if self._hearing < 0:
            return
        self._nudges += 1
        if self._nudges <= _NUDGES:
            self.signal(signal.SIGCONT, group=False)
            self._loop.later(_NUDGE_S, self._nudge)
            return
        self.signal(signal.SIGKILL, group=False)
        self._loop.unwatch(self._hearing)
        os.close(self._hearing)
        self._hearing = -1
        self._refuse(REFUSAL.pack(errno.ETIME, AT_FORK))

    def signal(self, number: int, *, group: bool) -> None:
        """Signal it; the caller sees to it that it has not been reaped."""
        try:
            if group and self.started:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def resize(self, rows: int, columns: int) -> None:
        if self.sink is not None and self.sink.fd >= 0 and self._master >= 0:
            resize(self.sink.fd, rows, columns)
            if self.started and not self.ended and not terminals_hang_up():
                self.signal(signal.SIGWINCH, group=True)

    def reaped(self, code: int, killed_by: int, use: tuple[int, int, int]) -> None:
        """Tell how it ended, after all that it has printed."""
        self.hear()
        if self.ended:
            return
        self.ended = True
        for stream in (OUT, ERR, BOTH):
            if stream in self.sources:
                self.sources[stream].drain(_PIPE_BYTES)
        if self._master >= 0 and self.sink is not None:
            self.sink.close()  # its terminal went with it
            if not terminals_hang_up():
                self.sources[OUT].drain(_TERMINAL_BYTES)
                self.sources[OUT].finish()
        if (code or killed_by) and not self.limit and self.judge is not None:
            self.limit = self.judge()
        self._outbox.say(EXITED, self.number, EXIT.pack(code, killed_by, *use, self.limit))

    def release(self) -> None:
        """Let go of its streams."""
        self.released = True
        if self._master >= 0 and self.started and not self.ended and not terminals_hang_up():
            self.signal(signal.SIGHUP, group=True)
            self.signal(signal.SIGCONT, group=True)
        for source in self.sources.values():
            source.close()
        if self.sink is not None:
            self.sink.drop()

    def _print_first(self) -> None:
        """Pass on what it has printed before what it then said on its channel."""
        for stream in (OUT, ERR):
            self.sources[stream].drain(0)

    def _close_input(self) -> None:
        if self.sink is not None:
            self.sink.drop()

    def _shut(self) -> None:
        if self.sink is not None:
            shut(self.sink)


def shut(sink: Sink) -> None:
    """End one direction of a socket."""
    with socket.socket(fileno=os.dup(sink.fd)) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_WR)
    sink.drop()
