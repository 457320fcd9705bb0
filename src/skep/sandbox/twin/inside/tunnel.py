"""A connection to a server inside, carried through the stream."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from skep.sandbox.twin.inside.flow import Sink, Source
from skep.sandbox.twin.inside.loop import WRITE, Loop, Outbox
from skep.sandbox.twin.inside.program import shut
from skep.sandbox.twin.inside.wire import BOTH

_CONNECT_S = 5.0
#: Nobody listens there, or there are no addresses of that family.
_NOBODY = (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)
_PLACES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


class Tunnel:
    """Tries 127.0.0.1 and then ::1: what `localhost` means differs between programs."""

    def __init__(self, loop: Loop, outbox: Outbox, number: int, *, answer: Callable[[object], None]) -> None:
        self._loop = loop
        self._outbox = outbox
        self._number = number
        self._answer = answer
        self._places = list(_PLACES)
        self._trying: socket.socket | None = None
        self.sources: dict[int, Source] = {}
        self.sink: Sink | None = None

    def connect(self, port: int, error: int = errno.ECONNREFUSED) -> None:
        if not self._places or error not in _NOBODY:
            self._answer(OSError(error, os.strerror(error)))
            return
        family, host = self._places.pop(0)
        try:
            trying = socket.socket(family)
        except OSError as refused:
            self.connect(port, refused.errno or errno.EAFNOSUPPORT)
            return
        trying.setblocking(False)
        code = trying.connect_ex((host, port))
        if code not in (0, errno.EINPROGRESS):
            trying.close()
            self.connect(port, code)
            return
        self._trying = trying
        self._loop.watch(trying.fileno(), WRITE, lambda: self._tried(trying, port))
        self._loop.later(_CONNECT_S, lambda: self._tried(trying, port, errno.ETIMEDOUT))

    def _tried(self, trying: socket.socket, port: int, error: int = 0) -> None:
        if self._trying is not trying:
            return
        self._trying = None
        self._loop.unwatch(trying.fileno())
        error = error or trying.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            trying.close()
            self.connect(port, error)
            return
        trying.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer(None)
        fd = trying.detach()
        self.sink = Sink(self._loop, self._outbox, self._number, os.dup(fd), finish=self._shut)
        self.sources[BOTH] = Source(self._loop, self._outbox, self._number, BOTH, fd)

    def release(self) -> None:
        if self._trying is not None:
            self._loop.unwatch(self._trying.fileno())
            self._trying.close()
            self._trying = None
        for source in self.sources.values():
            source.close()
        if self.sink is not None:
            self.sink.drop()

    def _shut(self) -> None:
        if self.sink is not None:
            shut(self.sink)
