"""Connect to an allowed host: look its name up outside, and dial only the very address that was checked."""

from __future__ import annotations

import asyncio
import socket

from skep.sandbox.egress.addresses import is_public
from skep.sandbox.egress.policy import Policy

_CONNECT_S = 10.0
_TRIES = 4


class Unreachable(Exception):
    """The host is allowed but cannot be reached; the message says why."""


async def dial(policy: Policy, host: str, port: int) -> socket.socket:
    """Return a connected socket that does not block."""
    failure: Exception | None = None
    for address, actual_port in (await _addresses(policy, host, port))[:_TRIES]:
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await _connect(address, actual_port)
        except OSError as error:  # TimeoutError is one
            failure = error
    raise Unreachable(f"{host}:{port} does not answer ({failure or 'no address'})")


async def _addresses(policy: Policy, host: str, port: int) -> list[tuple[str, int]]:
    if (pinned := policy.upstreams.get(host)) is not None:
        address, _, own_port = pinned.partition(":") if pinned.count(":") == 1 else (pinned, "", "")
        return [(address, int(own_port or port))]
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"{host} is not known ({error.strerror})") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    public = [address for address in addresses if is_public(address)]
    if not public:
        raise Unreachable(f"{host} leads to {addresses[0]}, which is not a public address")
    return [(address, port) for address in public]


async def _connect(address: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except BaseException:
        sock.close()
        raise
    return sock
