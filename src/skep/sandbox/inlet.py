"""Connections from the controller to servers inside, which the agent makes and hands out."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from skep.errors import Defect, InvalidRequest, LimitReached, NotFound
from skep.sandbox.agent import CONNECT, REFUSED, Agent

_CONNECT_S = 5.0
#: Nobody listens there, or the sandbox has no addresses of that family.
_NOBODY = (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)


async def connected(agent: Agent, port: int) -> socket.socket:
    """Connect to a server inside, on 127.0.0.1 or else on ::1: what `localhost` means differs between programs."""
    if not 0 < port < 65536:
        raise InvalidRequest(f"{port} is not a port", hint="use a number from 1 to 65535")
    for six in (0, 1):
        report = await agent.ask(CONNECT, port, six)
        if report.kind == REFUSED:
            error = report.a
        else:
            sock = _checked(report.fd)
            error = await _outcome(sock)
            if error == 0:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
        if error not in _NOBODY:
            break
    raise NotFound(
        f"nothing answers on port {port} in the sandbox: {os.strerror(error)}",
        hint="start the server, and let it listen on 127.0.0.1 inside",
    )


def _checked(fd: int) -> socket.socket:
    """Take over a descriptor that came from inside, if it is what was asked for."""
    if fd < 0:
        raise LimitReached("a connection's descriptor did not arrive", hint="raise this process's limit of open files")
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        os.close(fd)
        raise Defect("the agent handed out something that is not a socket") from error
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        sock.close()
        raise Defect("the agent handed out another socket than the one asked for")
    sock.setblocking(False)
    return sock


async def _outcome(sock: socket.socket) -> int:
    """Wait for the connection; return what became of it, closing it if nothing did."""
    error = errno.ETIMEDOUT
    try:
        async with asyncio.timeout(_CONNECT_S):
            await _writable(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    except TimeoutError:
        pass
    except asyncio.CancelledError:
        sock.close()
        raise
    if error != 0:
        sock.close()
    return error


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(sock)
