"""The proxy process: accepts what sandboxes send, lets through what their policies allow.

It is told everything over one socket by the controller and ends with it. Whose connection it has is known from the
socket it came in on, which nobody inside can choose.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import resource
import socket
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from skep.sandbox.egress.dns import Names
from skep.sandbox.egress.outlet import Outlet
from skep.sandbox.egress.placeholders import Placeholder, unusable
from skep.sandbox.egress.policy import read_policy
from skep.sandbox.egress.tls import Authority, new_authority

CONTROL_FD = 3
MESSAGE_LIMIT = 160 << 10
DESCRIPTORS_LIMIT = 64
_ROOTLESS_UID = 0x6FFFFFFF
_SECRET_S = 10.0
_LOOK_S = 1.0
_RESOLVERS = 64
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38


class Proxy:
    """All the outlets, and the conversation with the controller."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._outlets: dict[str, Outlet] = {}
        self._numbers = itertools.count(1)
        self._secrets: dict[int, asyncio.Future[str | None]] = {}
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the controller is gone."""
        loop = asyncio.get_running_loop()
        # One sandbox's slow names must not keep another's waiting.
        loop.set_default_executor(ThreadPoolExecutor(_RESOLVERS))
        self._control.setblocking(False)
        loop.add_reader(self._control, self._hear)
        self._tell({"event": "ready"})
        parent = os.getppid()
        # A child that the controller forked may hold the other end of the socket too.
        while not self._ended.is_set() and os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._ended.wait()

    def _hear(self) -> None:
        for _ in range(16):
            try:
                data, fds, _, _ = socket.recv_fds(self._control, MESSAGE_LIMIT, DESCRIPTORS_LIMIT)
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
        sandbox_id = message["sandbox"]
        trust = fds.pop(0) if message["trust"] else None
        self._outlets[sandbox_id] = Outlet(
            id=sandbox_id,
            policy=read_policy(message["policy"]),
            authority=Authority(message["key"].encode(), message["certificate"].encode()),
            placeholders=tuple(
                Placeholder(**{**entry, "ports": tuple(entry["ports"])}) for entry in message["secrets"]
            ),
            tell=self._tell,
            fetch=lambda name: self._fetch(sandbox_id, name),
            upstream_tls=None if trust is None else _trusting(trust),
            names=Names(message["turn"]),
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
                value = await answered
        except TimeoutError:
            return None
        finally:
            self._secrets.pop(number, None)
        return value if unusable(value) is None else None

    def _tell(self, message: dict[str, Any]) -> None:
        # A controller that does not listen loses news of refusals, not safety.
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(message).encode())


def _trusting(fd: int) -> ssl.SSLContext | None:
    """Return what is needed to check hosts against the certificates in an open file; None if there are none."""
    with open(fd, "rb") as file:
        data = file.read()
    try:
        return _context(hashlib.sha256(data).digest(), data.decode(errors="replace"))
    except (ssl.SSLError, ValueError):
        return None


_contexts: dict[bytes, ssl.SSLContext] = {}


def _context(key: bytes, certificates: str) -> ssl.SSLContext:
    # Reading a system's certificates takes longer than opening an outlet; most share them.
    if key not in _contexts:
        context = ssl.create_default_context(cadata=certificates)
        context.set_alpn_protocols(["http/1.1"])
        _contexts[key] = context
    return _contexts[key]


def _prepare() -> None:
    """Load what is loaded late now: once root's rights are gone, so may be the way to the files."""
    import concurrent.futures.thread  # noqa: F401
    import encodings.idna  # noqa: F401

    Authority(*new_authority()).context("localhost")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _drop_rights() -> None:
    """Give up what is not needed to serve. Memory with secrets in it is never written to disk."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_ROOTLESS_UID, _ROOTLESS_UID, _ROOTLESS_UID)
        os.setresuid(_ROOTLESS_UID, _ROOTLESS_UID, _ROOTLESS_UID)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def main() -> None:
    """Serve until the controller goes."""
    control = socket.socket(fileno=CONTROL_FD)
    _prepare()
    _drop_rights()

    async def serve() -> None:
        await Proxy(control).run()
        sys.stderr.flush()
        os._exit(0)  # nothing is worth waiting for: neither connections nor names that are being looked up

    asyncio.run(serve())


if __name__ == "__main__":
    main()
