"""A server inside a sandbox, reachable from the host at a loopback port or a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import socket
import stat
import tempfile
from functools import partial
from typing import Protocol, Self

from skep.errors import Conflict, InvalidRequest
from skep.sandbox.ports.token import NAME, Token
from skep.sandbox.ports.visit import Bounds, Visit

_HOSTS = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "[::1]": "::1"}
_PATH_LIMIT = 107
_BACKLOG = 128
#: Before the next try when this process has no descriptor left to accept with.
_PAUSE_S = 0.1


class Inhabited(Protocol):
    """What an exposure needs of a sandbox."""

    async def connect(self, port: int) -> socket.socket: ...

    async def gone(self) -> None: ...


class Exposure:
    """A way in to one port. It ends when it is closed, and with the sandbox.

    At a loopback port it speaks HTTP/1 and WebSocket, and `token` is asked for with every request. At a unix socket
    it carries any bytes, and only who may enter the socket's folder can use it.
    """

    def __init__(
        self, sandbox: Inhabited, port: int, listener: socket.socket, *, bounds: Bounds, made: str | None = None
    ) -> None:
        listener.setblocking(False)
        self.port = port
        self._sandbox = sandbox
        self._listener = listener
        self._bounds = bounds
        self._made = made
        self._token: Token | None = None
        #: Where the unix socket is; None for a loopback port.
        self.path: str | None = None
        if listener.family == socket.AF_UNIX:
            self.path = listener.getsockname()
            self._inode = os.stat(self.path).st_ino
            self.url = f"unix:{self.path}"
        else:
            host, number = listener.getsockname()[:2]
            self._token = Token(number)
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{number}/"
        self._visits: set[asyncio.Task[None]] = set()
        self._task = asyncio.ensure_future(self._serve())
        # For a task that is cancelled before its first step, whose `finally` never runs.
        self._task.add_done_callback(lambda _: self._stop_listening())

    @classmethod
    async def open(cls, sandbox: Inhabited, port: int, *, at: str, bounds: Bounds | None = None) -> Exposure:
        """Listen at `at` for visitors to a port inside, where a server need not listen yet."""
        if not 0 < port < 65536:
            raise InvalidRequest(f"{port} is not a port", hint="use a number from 1 to 65535")
        made = tempfile.mkdtemp(prefix="skep-port-") if at == "unix" else None
        place = os.path.join(made, "socket") if made else at
        listener = _listen_unix(place) if place.startswith("/") else _listen_loopback(place)
        return cls(sandbox, port, listener, bounds=bounds or Bounds(), made=made)

    @property
    def token(self) -> str:
        """What whoever uses it has to know: the token, or where the socket is."""
        return self._token.text if self._token else self.path or ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers with which a program uses it."""
        return {"Authorization": f"Bearer {self._token.text}"} if self._token else {}

    @property
    def link(self) -> str:
        """The address with which a person opens it in a browser; it holds the token."""
        return f"{self.url}?{NAME}={self._token.text}" if self._token else self.url

    @property
    def closed(self) -> bool:
        return self._task.done()

    async def close(self) -> None:
        """End it and every connection through it."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _serve(self) -> None:
        accepting = asyncio.ensure_future(self._accept())
        gone = asyncio.ensure_future(self._sandbox.gone())
        try:
            await asyncio.wait((accepting, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop_listening()
            for task in (accepting, gone, *self._visits):
                task.cancel()
            await asyncio.gather(accepting, gone, *self._visits, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS, errno.ENOMEM):
                    raise
                await asyncio.sleep(_PAUSE_S)
                continue
            self._receive(client)

    def _receive(self, client: socket.socket) -> None:
        visit = Visit(client, partial(self._sandbox.connect, self.port), self._token, self._bounds)
        # Twice as many as are served may be here for as long as it takes to be told so.
        if len(self._visits) < self._bounds.connections:
            task = asyncio.ensure_future(visit.serve())
        elif len(self._visits) < 2 * self._bounds.connections:
            task = asyncio.ensure_future(visit.turn_away())
        else:
            visit.close()
            return
        self._visits.add(task)
        task.add_done_callback(self._visits.discard)

    def _stop_listening(self) -> None:
        """Close the listener, and take a unix socket's name away if it is still this socket's."""
        if self._listener.fileno() < 0:
            return
        self._listener.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                if os.lstat(self.path).st_ino == self._inode:
                    os.unlink(self.path)
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


def _listen_loopback(at: str) -> socket.socket:
    host, _, digits = at.rpartition(":")
    if host not in _HOSTS or not re.fullmatch("[0-9]{1,5}", digits) or (port := int(digits)) > 65535:
        raise InvalidRequest(
            f"{at[:60]!r} is not a place to expose a port at",
            hint="use 127.0.0.1:PORT, localhost:PORT or [::1]:PORT (0 for any that is free), or a path",
        )
    listener = socket.socket(socket.AF_INET6 if ":" in _HOSTS[host] else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOSTS[host], port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise Conflict(f"cannot listen at {at}: {error.strerror}", hint="choose another port, or 0 for any") from error
    return listener


def _listen_unix(path: str) -> socket.socket:
    if len(os.fsencode(path)) > _PATH_LIMIT:
        raise InvalidRequest("the path of a unix socket has room for 107 bytes", hint="choose a shorter one")
    _claim_folder(os.path.dirname(path))
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise Conflict(f"cannot listen at {path!r}: {error.strerror}", hint="remove it, or choose another") from error
    return listener


def _claim_folder(folder: str) -> None:
    """Make the folder, or check that nobody else may enter it: whoever can reach the socket can use it."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
    except OSError as error:
        raise InvalidRequest(f"cannot use {folder!r}: {error.strerror}", hint="choose another folder") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
        raise InvalidRequest(
            f"others than you may enter {folder!r}, and so use the port", hint=f"chmod 700 {folder}, or use at='unix'"
        )
