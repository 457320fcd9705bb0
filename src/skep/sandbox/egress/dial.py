"""Connect to an allowed host: look its name up outside, and dial only the very address that was checked."""

from __future__ import annotations

import asyncio
import os
import socket

from skep.sandbox.egress.addresses import is_ours, is_public
from skep.sandbox.egress.policy import Policy, parse_upstream

_LOOK_UP_S = 10.0
_CONNECT_S = 10.0
_TRIES = 3


class Unreachable(Exception):
    """The host is allowed but cannot be reached; the message says why."""


async def dial(policy: Policy, host: str, port: int) -> socket.socket:
    """Return a connected socket that does not block."""
    failure: Exception | None = None
    for address, actual_port in (await addresses(policy, host, port))[:_TRIES]:
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await _connect(address, actual_port)
        except OSError as error:  # TimeoutError is one
            failure = error
    raise Unreachable(f"{host}:{port} does not answer ({_reason(failure)})")


async def addresses(policy: Policy, host: str, port: int) -> list[tuple[str, int]]:
    """Return where a host can be dialled. Names are not looked up again after this."""
    if (pinned := policy.upstreams.get(host)) is not None:
        address, own_port = parse_upstream(pinned)
        return [(address, own_port or port)]
    found = await _look_up(host, port)
    public = [address for address in found if is_public(address) and not is_ours(address)]
    if not public:
        raise Unreachable(f"{host} leads to {found[0]}, which is not a public address of another machine")
    return [(address, port) for address in public]


async def _look_up(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_LOOK_UP_S):
            # The dot keeps the resolver from trying the name below this machine's own domains.
            found = await loop.getaddrinfo(f"{host}.", port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"{host} is not known ({_reason(error)})") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


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


def _reason(error: Exception | None) -> str:
    """Say what went wrong without the address: where an operator has pinned a host is nobody's business inside."""
    if isinstance(error, socket.gaierror):
        return error.strerror or "unknown"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return "it took too long"
