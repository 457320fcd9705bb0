"""The controller's side of the proxy: start it, tell it of sandboxes, hear from it, bring it back when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

from skep.errors import InvalidRequest, SandboxUnusable
from skep.sandbox.agent import OPEN, order
from skep.sandbox.binary import native
from skep.sandbox.egress.network import Event, Network
from skep.sandbox.egress.placeholders import Placeholder
from skep.sandbox.egress.policy import PROXY_PORT, Policy, normal_host
from skep.sandbox.rootfs import TRUSTED

_DNS_PORT = 53
_MOST_PORTS = 15
_BACK_S = 0.1
_LISTENERS_PER_MESSAGE = 32
#: Programs that bring certificates of their own look here for others.
_TRUST_VARIABLES = (
    "AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO", "CURL_CA_BUNDLE", "DENO_CERT", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS",
    "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE",
)  # fmt: skip


class Passage:
    """One sandbox's way out, as its controller holds it."""

    def __init__(self, gate: Gate, sandbox_id: str, network: Network, authority: tuple[bytes, bytes]) -> None:
        self._gate = gate
        self._id = sandbox_id
        self._key, self.certificate = authority
        self._namespace = -1
        self._listeners: list[socket.socket] = []
        self._ports: set[int] = set()
        self.network = network
        self.policy = network.policy
        self.placeholders = {
            variable: Placeholder.make(variable, host=normal_host(secret.host), header=secret.header)
            for variable, secret in network.secrets.items()
        }

    def environment(self) -> dict[str, str]:
        """Return what programs inside go by: whom to trust, and the stand-ins for secrets."""
        trust = dict.fromkeys(_TRUST_VARIABLES, TRUSTED)
        return {**trust, **{variable: placeholder.text for variable, placeholder in self.placeholders.items()}}

    async def open(self, namespace: int) -> None:
        """Open the sandbox's network, given its namespace, which this takes over."""
        self._namespace = namespace
        await self._listen(sorted({_DNS_PORT, PROXY_PORT} | self.policy.ports), lead_home=True)
        self._gate.add(self)

    async def change(self, policy: Policy) -> None:
        """Apply another policy to the running sandbox."""
        self.policy = policy
        self._gate.send({"do": "change", "sandbox": self._id, "policy": _write(policy)})
        if more := sorted(policy.ports - self._ports):
            opened = await self._listen(more, lead_home=False)
            self._gate.send({"do": "listen", "sandbox": self._id}, [listener.fileno() for listener in opened])

    async def close(self) -> None:
        self._gate.send({"do": "close", "sandbox": self._id})
        for listener in self._listeners:
            listener.close()
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1
        await self._gate.drop(self)

    @property
    def id(self) -> str:
        return self._id

    def introduction(self) -> tuple[dict[str, Any], list[int]]:
        """Return what a new proxy has to know of this sandbox, and the sockets it needs."""
        message = {
            "do": "open",
            "sandbox": self._id,
            "policy": _write(self.policy),
            "key": self._key.decode(),
            "certificate": self.certificate.decode(),
            "placeholders": [asdict(placeholder) for placeholder in self.placeholders.values()],
            "trust": self.network.trust,
        }
        return message, [listener.fileno() for listener in self._listeners]

    async def _listen(self, ports: Sequence[int], *, lead_home: bool) -> list[socket.socket]:
        if len(ports) > _MOST_PORTS:
            raise InvalidRequest(f"{len(ports)} ports are too many", hint=f"allow at most {_MOST_PORTS - 4} others")
        fds = await asyncio.to_thread(open_door, self._namespace, ports, lead_home=lead_home)
        opened = [socket.socket(fileno=fd) for fd in fds]
        self._listeners += opened
        self._ports |= set(ports)
        return opened


class Gate:
    """The proxy of one event loop, shared by all its sandboxes. It runs while there is one."""

    def __init__(self) -> None:
        self._passages: dict[str, Passage] = {}
        self._control: socket.socket | None = None
        self._pid = 0
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, passage: Passage) -> None:
        self._passages[passage.id] = passage
        if self._watching is None:
            self._start()
        else:
            self._introduce(passage)

    async def drop(self, passage: Passage) -> None:
        self._passages.pop(passage.id, None)
        if not self._passages and self._watching is not None:
            watching, self._watching = self._watching, None
            self._hang_up()
            await watching

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Tell the proxy. One that is just being replaced is told anew with the introductions."""
        if self._control is None:
            return
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], list(fds))
        except OSError:
            self._hang_up()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        arguments = [sys.executable, "-P", "-m", "skep.sandbox.egress.proxy"]
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                arguments,
                environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)],
                setsid=True,
            )
        finally:
            theirs.close()
        self._control = ours
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._hear, ours)
        for passage in self._passages.values():
            self._introduce(passage)
        self._watching = asyncio.ensure_future(self._watch(self._pid))

    def _introduce(self, passage: Passage) -> None:
        message, fds = passage.introduction()
        self.send(message, fds[:_LISTENERS_PER_MESSAGE])
        if fds[_LISTENERS_PER_MESSAGE:]:
            self.send({"do": "listen", "sandbox": passage.id}, fds[_LISTENERS_PER_MESSAGE:])

    async def _watch(self, pid: int) -> None:
        """Wait for the proxy to end; while sandboxes need one, start another."""
        pidfd = os.pidfd_open(pid)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        await asyncio.to_thread(os.waitpid, pid, 0)
        self._hang_up()
        if self._passages and self._watching is not None:
            for passage in self._passages.values():
                passage.network.on_event(Event("proxy_lost", passage.id, {}))
            await asyncio.sleep(_BACK_S)
            self._start()

    def _hang_up(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

    def _hear(self, control: socket.socket) -> None:
        while True:
            try:
                data = control.recv(64 << 10)
            except OSError:
                return
            if not data:
                self._hang_up()
                return
            self._take(json.loads(data))

    def _take(self, message: dict[str, Any]) -> None:
        kind, passage = message.pop("event"), self._passages.get(message.pop("sandbox"))
        if passage is None:
            return
        if kind == "fetch":
            task = asyncio.ensure_future(self._provide(passage, message["number"], message["name"]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            passage.network.on_event(Event(kind, passage.id, message))

    async def _provide(self, passage: Passage, number: int, name: str) -> None:
        secret = passage.network.secrets.get(name)
        value: str | None = None
        if secret is not None:
            # Whatever keeps a value from being had, the request is refused, and the proxy says so.
            with contextlib.suppress(Exception):
                value = await secret.fetch()
        self.send({"do": "secret", "number": number, "value": value})


_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, Gate] = WeakKeyDictionary()


def gate() -> Gate:
    """Return the gate of the running event loop."""
    return _gates.setdefault(asyncio.get_running_loop(), Gate())


def open_door(namespace: int, ports: Sequence[int], *, lead_home: bool) -> list[int]:
    """Open listening sockets in a sandbox's network namespace and return them; port 53 gives two."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = os.memfd_create("ports", os.MFD_CLOEXEC)
    complaints = os.memfd_create("complaints", os.MFD_CLOEXEC)
    try:
        os.write(memory, struct.pack(f"={len(ports)}H", *ports))
        actions = [(os.POSIX_SPAWN_DUP2, complaints, 2), (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
        pid = os.posix_spawn(native("skep-agent"), ["skep-agent", "door"], {}, file_actions=actions)
        theirs.close()
        socket.send_fds(ours, [order(OPEN, 1, int(lead_home))], [namespace, memory])
        data, fds, _, _ = socket.recv_fds(ours, 128, 64)
        os.waitpid(pid, 0)
        if not data:
            said = os.pread(complaints, 4096, 0).decode(errors="replace").strip()
            raise SandboxUnusable(
                f"the sandbox's network cannot be opened: {said}", hint="run the sandbox without an allow-list"
            )
        return fds
    finally:
        ours.close()
        theirs.close()
        os.close(memory)
        os.close(complaints)


def _write(policy: Policy) -> dict[str, Any]:
    return {
        "allow": [str(rule) for rule in policy.rules],
        "upstreams": policy.upstreams,
        "traffic": asdict(policy.traffic),
    }
