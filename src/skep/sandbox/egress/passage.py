"""One sandbox's way out, as its controller holds it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from skep.errors import InvalidRequest, SandboxUnusable
from skep.sandbox.egress.door import MOST_PORTS, open_door
from skep.sandbox.egress.network import Network
from skep.sandbox.egress.placeholders import Placeholder
from skep.sandbox.egress.policy import DNS_PORT, PROXY_PORT, Policy, write_policy
from skep.sandbox.rootfs import TRUSTED

if TYPE_CHECKING:
    from skep.sandbox.egress.gate import Gate

_POLICY_BYTES = 96 << 10
#: Programs that bring certificates of their own look here for others.
_TRUST_VARIABLES = (
    "AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO", "CURL_CA_BUNDLE", "DENO_CERT", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS",
    "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE",
)  # fmt: skip


class Passage:
    """One sandbox's way out: its sockets, its authority, its policy and the stand-ins for its secrets."""

    def __init__(self, gate: Gate, sandbox_id: str, network: Network, authority: tuple[bytes, bytes]) -> None:
        self._gate = gate
        self.id = sandbox_id
        self._key, self.certificate = authority
        self._namespace = -1
        self._listeners: list[socket.socket] = []
        self._ports: set[int] = set()
        self.network = network
        self.policy = network.policy
        self.placeholders = {
            variable: Placeholder.make(variable, host=secret.host, header=secret.header)
            for variable, secret in network.secrets.items()
        }
        _check(self.policy)
        if self.placeholders and not os.access(network.trust, os.R_OK):
            raise InvalidRequest(
                f"the certificates in {network.trust} cannot be read", hint="name a readable file as `trust`"
            )

    def environment(self) -> dict[str, str]:
        """Return what programs inside go by: whom to trust, and the stand-ins for secrets."""
        trust = dict.fromkeys(_TRUST_VARIABLES, TRUSTED)
        return {**trust, **{variable: placeholder.text for variable, placeholder in self.placeholders.items()}}

    async def open(self, namespace: int) -> None:
        """Open the sandbox's network, given its namespace, which this takes over."""
        if namespace < 0:
            raise SandboxUnusable("the sandbox does not hand out its network", hint="create it again")
        self._namespace = namespace
        try:
            await self._listen(sorted({DNS_PORT, PROXY_PORT} | self.policy.ports), lead_home=True)
            await self._gate.add(self)
        except BaseException:
            await self.close()
            raise

    async def change(self, policy: Policy) -> None:
        """Apply another policy to the running sandbox. What it takes away is gone even if this fails."""
        _check(policy)
        self.policy = policy
        self._gate.send({"do": "change", "sandbox": self.id, "policy": write_policy(policy)})
        if more := sorted(policy.ports - self._ports):
            opened = await self._listen(more, lead_home=False)
            self._gate.send({"do": "listen", "sandbox": self.id}, [listener.fileno() for listener in opened])

    async def close(self) -> None:
        self._gate.send({"do": "close", "sandbox": self.id})
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1
        await self._gate.drop(self)

    def introduce(self, turn: int) -> None:
        """Tell a new proxy, the `turn`-th in a row, what it has to know of this sandbox."""
        trust: list[int] = []
        # Without it hosts of secrets cannot be checked, so they are not reached.
        with contextlib.suppress(OSError):
            trust += [os.open(self.network.trust, os.O_RDONLY | os.O_CLOEXEC)] if self.placeholders else []
        message = {
            "do": "open",
            "sandbox": self.id,
            "policy": write_policy(self.policy),
            "key": self._key.decode(),
            "certificate": self.certificate.decode(),
            "secrets": [asdict(placeholder) for placeholder in self.placeholders.values()],
            "trust": bool(trust),
            "turn": turn,
        }
        try:
            self._gate.send(message, trust)
        finally:
            for fd in trust:
                os.close(fd)
        fds = [listener.fileno() for listener in self._listeners]
        for first in range(0, len(fds), 2 * MOST_PORTS):
            self._gate.send({"do": "listen", "sandbox": self.id}, fds[first : first + 2 * MOST_PORTS])

    async def _listen(self, ports: Sequence[int], *, lead_home: bool) -> list[socket.socket]:
        if len(ports) > MOST_PORTS:
            raise InvalidRequest(f"{len(ports)} ports are too many", hint=f"allow at most {MOST_PORTS - 4} others")
        opened = await asyncio.to_thread(open_door, self._namespace, ports, lead_home=lead_home)
        self._listeners += opened
        self._ports |= set(ports)
        return opened


def _check(policy: Policy) -> None:
    """Refuse a policy that does not fit into one message to the proxy."""
    if len(json.dumps(write_policy(policy))) > _POLICY_BYTES:
        raise InvalidRequest("the allow-list is too long", hint="allow hosts by suffix, such as *.example.org")
