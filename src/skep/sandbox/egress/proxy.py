"""The proxy process: accepts what sandboxes send, lets through what their policies allow.

It is told everything over one socket by the controller and ends with it. Whose connection it has is known from the
socket it came in on, which nobody inside can choose.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from skep.errors import InvalidRequest
from skep.sandbox.egress.connection import Connection
from skep.sandbox.egress.dns import Names, answer
from skep.sandbox.egress.placeholders import Placeholder
from skep.sandbox.egress.policy import Policy, Traffic, parse_policy
from skep.sandbox.egress.tls import Authority

CONTROL_FD = 3
MESSAGE_LIMIT = 160 << 10
_ROOTLESS_UID = 0x6FFFFFFF
_SECRET_S = 10.0


@dataclass(slots=True)
class Outlet:
    """One sandbox's way out."""

    id: str
    policy: Policy
    authority: Authority
    placeholders: tuple[Placeholder, ...]
    tell: Callable[[dict[str, Any]], None]
    fetch: Callable[[str], Any]
    upstream_tls: ssl.SSLContext
    names: Names = field(default_factory=Names)
    connections: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    bytes_used: int = 0

    def change(self, policy: Policy) -> None:
        """Apply another policy at once: connections that it does not allow are cut."""
        self.policy = policy
        for connection in list(self.connections):
            if connection.bound is not None and not policy.allows(*connection.bound):
                connection.cut()

    def note(self, kind: str, **details: object) -> None:
        self.tell({"event": kind, "sandbox": self.id, **details})

    def listen(self, listener: socket.socket) -> None:
        work = self._answer_names if listener.type == socket.SOCK_DGRAM else self._accept
        self._keep(asyncio.ensure_future(work(listener)))

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.cut()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    client, _ = await loop.sock_accept(listener)
                except OSError:  # out of descriptors, or the client has gone already
                    await asyncio.sleep(0.05)
                    continue
                if len(self.connections) >= self.policy.traffic.connections:
                    self.note("limited", limit="connections")
                    client.close()
                    continue
                connection = Connection(self, client)
                self.connections.add(connection)
                self._keep(asyncio.ensure_future(connection.serve()))

    async def _answer_names(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(listener, ready.set)
        try:
            while True:
                await ready.wait()
                ready.clear()
                for _ in range(32):
                    if not _answer_one(listener, self.names):
                        break
                else:
                    ready.set()
                await asyncio.sleep(0)
        finally:
            loop.remove_reader(listener)
            listener.close()


def _answer_one(listener: socket.socket, names: Names) -> bool:
    """Answer one question, from the very address it was sent to; False when there is none."""
    try:
        query, ancillary, _, client = listener.recvmsg(1500, 256)
    except OSError:
        return False
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


class Proxy:
    """All the outlets, and the conversation with the controller."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._outlets: dict[str, Outlet] = {}
        self._numbers = itertools.count(1)
        self._secrets: dict[int, asyncio.Future[str | None]] = {}
        self._ended = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        loop.add_reader(self._control, self._hear)
        await self._ended.wait()

    def _hear(self) -> None:
        for _ in range(16):
            try:
                data, fds, _, _ = socket.recv_fds(self._control, MESSAGE_LIMIT, 64)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._ended.set()
                return
            self._obey(json.loads(data), fds)

    def _obey(self, message: dict[str, Any], fds: list[int]) -> None:
        match message["do"]:
            case "open":
                self._open(message, fds)
            case "listen":
                self._listen(message["sandbox"], fds)
            case "change":
                if (outlet := self._outlets.get(message["sandbox"])) is not None:
                    outlet.change(read_policy(message["policy"]))
            case "close":
                if (outlet := self._outlets.pop(message["sandbox"], None)) is not None:
                    outlet.close()
            case "secret":
                if (waiting := self._secrets.pop(message["number"], None)) is not None and not waiting.done():
                    waiting.set_result(message["value"])

    def _open(self, message: dict[str, Any], fds: list[int]) -> None:
        upstream_tls = ssl.create_default_context(cafile=message["trust"])
        upstream_tls.set_alpn_protocols(["http/1.1"])
        sandbox_id = message["sandbox"]
        self._outlets[sandbox_id] = Outlet(
            id=sandbox_id,
            policy=read_policy(message["policy"]),
            authority=Authority(message["key"].encode(), message["certificate"].encode()),
            placeholders=tuple(Placeholder(**entry) for entry in message["placeholders"]),
            tell=self._tell,
            fetch=lambda name: self._fetch(sandbox_id, name),
            upstream_tls=upstream_tls,
        )
        self._listen(sandbox_id, fds)

    def _listen(self, sandbox_id: str, fds: list[int]) -> None:
        for fd in fds:
            listener = socket.socket(fileno=fd)
            listener.setblocking(False)
            if (outlet := self._outlets.get(sandbox_id)) is not None:
                outlet.listen(listener)
            else:
                listener.close()

    async def _fetch(self, sandbox_id: str, name: str) -> str | None:
        """Ask the controller for a secret's value, for this one call."""
        number = next(self._numbers)
        answered: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._secrets[number] = answered
        self._tell({"event": "fetch", "sandbox": sandbox_id, "number": number, "name": name})
        try:
            async with asyncio.timeout(_SECRET_S):
                return await answered
        except TimeoutError:
            return None
        finally:
            self._secrets.pop(number, None)

    def _tell(self, message: dict[str, Any]) -> None:
        # A controller that does not listen loses news of refusals, not safety.
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(message).encode())


def read_policy(text: dict[str, Any]) -> Policy:
    """Read a policy as `write_policy` wrote it."""
    return parse_policy(text["allow"], upstreams=text["upstreams"], traffic=Traffic(**text["traffic"]))


def main() -> None:
    """Serve until the controller goes."""
    import encodings.idna  # noqa: F401  loaded now: once root's rights are gone, so may be the way to the file

    control = socket.socket(fileno=CONTROL_FD)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_ROOTLESS_UID, _ROOTLESS_UID, _ROOTLESS_UID)
        os.setresuid(_ROOTLESS_UID, _ROOTLESS_UID, _ROOTLESS_UID)

    async def serve() -> None:
        await Proxy(control).run()

    try:
        asyncio.run(serve())
    except InvalidRequest as error:
        sys.exit(f"skep egress proxy: {error}")


if __name__ == "__main__":
    main()
