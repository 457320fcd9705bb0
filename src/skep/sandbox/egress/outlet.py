"""One sandbox's way out, as the proxy holds it: what it may do, what it has used, and its connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from skep.sandbox.egress.connection import Connection
from skep.sandbox.egress.dns import Names, answer
from skep.sandbox.egress.http import refusal
from skep.sandbox.egress.placeholders import Placeholder
from skep.sandbox.egress.policy import DEFAULT_PORTS, PROXY_PORT, Policy
from skep.sandbox.egress.tls import Authority

_DIALS = 32
_SECRETS_KEPT = 64
_LOOK_S = 1.0
#: How many of each are seen to before others get their turn.
_ACCEPTS, _ANSWERS = 16, 32
_REST_S = 0.05
#: How long a host may still take to answer a client that has closed its side.
_GIVEN_UP_S = 10.0
#: Events that may be told at once, and each second after.
_EVENTS, _EVENTS_PER_S = 200.0, 20.0


@dataclass(eq=False, slots=True)
class Outlet:
    """One sandbox's way out."""

    id: str
    policy: Policy
    authority: Authority
    placeholders: tuple[Placeholder, ...]
    tell: Callable[[dict[str, Any]], None]
    fetch: Callable[[str], Awaitable[str | None]]
    upstream_tls: ssl.SSLContext | None
    names: Names = field(default_factory=Names)
    connections: set[Connection] = field(default_factory=set)
    dialling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_DIALS))
    #: Values that were put in for this sandbox and must not come back to it, the newest last.
    known: dict[bytes, None] = field(default_factory=dict)
    _listeners: list[socket.socket] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _bytes_used: int = 0
    _events_left: float = _EVENTS
    _events_at: float = 0.0
    _missed: int = 0

    def change(self, policy: Policy) -> None:
        """Apply another policy at once: connections that it does not allow, or leads elsewhere, are cut."""
        before, self.policy = self.policy, policy
        for connection in list(self.connections):
            if connection.bound is None:
                continue
            host, port = connection.bound
            if not policy.allows(host, port) or policy.upstreams.get(host) != before.upstreams.get(host):
                connection.cut()

    def note(self, kind: str, **details: object) -> None:
        """Tell the controller, within bounds: a sandbox that provokes events must not fill its log."""
        now = asyncio.get_running_loop().time()
        self._events_left = min(_EVENTS, self._events_left + (now - self._events_at) * _EVENTS_PER_S)
        self._events_at = now
        if self._events_left < 1:
            self._missed += 1
            return
        self._events_left -= 1
        missed, self._missed = self._missed, 0
        self.tell({"event": kind, "sandbox": self.id, **details, **({"missed": missed} if missed else {})})

    def count(self, size: int) -> None:
        """Count bytes that were moved; past the limit nothing moves any more."""
        self._bytes_used += size
        if self._bytes_used > self.policy.traffic.bytes_total:
            self.note("limited", limit="bytes")
            raise ConnectionAbortedError("the sandbox has used up its traffic")

    def remember(self, values: Iterable[bytes]) -> None:
        """Keep values out of every answer from now on."""
        for value in values:
            self.known.pop(value, None)
            self.known[value] = None
        while len(self.known) > _SECRETS_KEPT:
            del self.known[next(iter(self.known))]

    def listen(self, listener: socket.socket) -> None:
        if not self._listeners:
            self._keep(self._close_idle())
        self._listeners.append(listener)
        work = self._answer_names if listener.type == socket.SOCK_DGRAM else self._accept
        asyncio.get_running_loop().add_reader(listener, work, listener)

    def close(self) -> None:
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for task in self._tasks:
            task.cancel()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self, listener: socket.socket) -> None:
        """Take in those who wait, a few at a time."""
        for _ in range(_ACCEPTS):
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the client has gone already, or there is no descriptor to be had: others go first
                self._rest(listener)
                return
            if len(self.connections) >= self.policy.traffic.connections:
                self._turn_away(client)
                continue
            try:
                connection = Connection(self, client)
            except OSError:
                client.close()
                continue
            self.connections.add(connection)
            self._keep(connection.serve())

    def _rest(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(_REST_S, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _turn_away(self, client: socket.socket) -> None:
        most = self.policy.traffic.connections
        self.note("limited", limit="connections")
        with client, contextlib.suppress(OSError):
            if client.getsockname()[1] in (*DEFAULT_PORTS, PROXY_PORT):
                client.setblocking(False)
                client.send(refusal("503", f"Skep blocked this request: {most} connections are open already."))

    async def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            idle_s = self.policy.traffic.idle_s
            await asyncio.sleep(min(_LOOK_S, idle_s / 2))
            for connection in list(self.connections):
                # A client that has closed may only have said all it has to say; most have given up.
                gone = connection.awaited_by is not None and connection.awaited_by.has_ended
                if loop.time() - connection.active_at > (min(idle_s, _GIVEN_UP_S) if gone else idle_s):
                    connection.cut()

    def _answer_names(self, listener: socket.socket) -> None:
        for _ in range(_ANSWERS):
            if not _answer_one(listener, self.names):
                return


def _answer_one(listener: socket.socket, names: Names) -> bool:
    """Answer one question, from the very address it was sent to; False when there is none."""
    try:
        query, ancillary, _, client = listener.recvmsg(1500, 256)
    except BlockingIOError:
        return False
    except OSError:  # what an earlier answer met
        return True
    reply = answer(query, names)
    if reply is not None:
        with contextlib.suppress(OSError):
            listener.sendmsg([reply], _reply_address(ancillary), 0, client)
    return True


def _reply_address(ancillary: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
            return [(level, kind, data[:16] + struct.pack("i", 0))]
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, 8):  # IP_PKTINFO
            return [(level, kind, struct.pack("i", 0) + data[8:12] + bytes(4))]
    return []
