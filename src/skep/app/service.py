"""A server for a home: the HTTP door over an engine, until somebody ends it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING

import uvicorn
from sse_starlette.sse import AppStatus

from skep import __version__
from skep.app import presence
from skep.app.apiary import Tell
from skep.app.engine import Engine, open_engine
from skep.app.presence import Post, Server
from skep.app.program import Program, open_program
from skep.app.readiness import checks
from skep.config import Environment, Settings
from skep.config.secrets import mask_text
from skep.errors import Conflict, Denied, InvalidRequest
from skep.gateway.api import build
from skep.gateway.door import Door
from skep.gateway.tokens import MAIN, Tokens

if TYPE_CHECKING:
    from starlette.types import ASGIApp

#: How long requests that run get to end when the server does.
_GRACE_S = 5
_CONNECTIONS = 1000
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104  how they are reached from this machine


async def serve(environment: Environment, settings: Settings, *, tell: Tell, began: Callable[[Server], None]) -> None:
    """Serve until SIGTERM or SIGINT, and let what runs end; at a second one end at once.

    `began` is called when the server answers.
    """
    with presence.take(environment.paths.home) as post, bound(settings) as listening:
        async with open_program(environment.paths, settings) as program:
            await program.accounts.ensure(MAIN)
            Tokens(environment.paths.home / "keys").of(MAIN)
            async with open_engine(program, environment, tell=tell, patient=False) as engine:
                door = _door(program, environment, engine)
                server = Server(
                    os.getpid(),
                    _address(settings, listening),
                    presence.state_name(environment.paths, settings),
                    __version__,
                )
                await _run(door, listening, names=_names(settings), begin=lambda: _begin(post, server, began))


def _begin(post: Post, server: Server, began: Callable[[Server], None]) -> None:
    post.announce(server)
    began(server)


def _door(program: Program, environment: Environment, engine: Engine) -> Door:
    secrets = environment.secrets

    return Door(
        tasks=engine.worker.tasks,
        hives=program.hives,
        sessions=engine.sessions,
        tokens=Tokens(program.paths.home / "keys"),
        checks=checks(program.database, engine),
        accept=lambda: engine.models.choose("work"),
        mask=lambda said: mask_text(said, secrets),
    )


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: it would raise each signal anew at the end."""

    def __init__(self, app: ASGIApp, begin: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http="h11",
                proxy_headers=False,
                server_header=False,
                limit_concurrency=_CONNECTIONS,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._begin = begin

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._begin()


async def _run(door: Door, listening: socket.socket, *, names: Collection[str], begin: Callable[[], None]) -> None:
    server = _Uvicorn(build(door, names=names), begin)

    def stop() -> None:
        door.closing.set()
        AppStatus.should_exit = True  # ends the streams
        server.should_exit = True

    async with _stopping(stop):
        await server.serve([listening])


@asynccontextmanager
async def _stopping(stop: Callable[[], None]) -> AsyncIterator[None]:
    """Call `stop` at the first signal to end; at the second cancel what runs."""
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    stopping = False

    def heard() -> None:
        nonlocal stopping
        if stopping and running is not None:
            running.cancel()
        stopping = True
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, heard)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextmanager
def bound(settings: Settings) -> Iterator[socket.socket]:
    """Give the socket at which the gateway is to listen."""
    host, port = settings.gateway.host, settings.gateway.port
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # With its protocol named asyncio sends each event at once, instead of waiting for the client to have the last.
        found = socket.socket(family, kind, protocol)
    except socket.gaierror as error:
        raise InvalidRequest(f"gateway.host {host} is no address", hint="use 127.0.0.1, or see: ip addr") from error
    with found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address)
        except OSError as error:
            raise _unbound(error, host, port) from error
        found.setblocking(False)
        yield found


def _unbound(error: OSError, host: str, port: int) -> Exception:
    match error.errno:
        case errno.EADDRINUSE:
            return Conflict(f"another program listens at {host}:{port}", hint="take another port: skep serve --port 0")
        case errno.EACCES:
            return Denied(f"port {port} is for root alone", hint="take one above 1023: skep serve --port 7411")
        case errno.EADDRNOTAVAIL:
            return InvalidRequest(f"{host} is no address of this machine", hint="use 127.0.0.1, or see: ip addr")
        case _:
            return error


def _address(settings: Settings, listening: socket.socket) -> str:
    host, port = settings.gateway.host, listening.getsockname()[1]
    return f"http://{_WILDCARDS.get(host) or _bracketed(host)}:{port}"


def _names(settings: Settings) -> list[str]:
    host = settings.gateway.host
    return [*settings.gateway.names, *([] if host in _WILDCARDS else [_bracketed(host)])]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def is_public(host: str) -> bool:
    """Say whether others than this machine can reach the server."""
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
