"""What every request passes before anything else looks at it: whose name it calls, where it comes from, its body.

A loopback port can be reached by every page in a browser of this machine. A page of another site may not ask, and a
name that leads here only for the moment (DNS rebinding) is not answered to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skep.errors import Denied, InvalidRequest, SkepError
from skep.gateway.refusal import TooLarge, TooSlow, answer

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request may bring along."""

    body_bytes: int = 2 * 1024 * 1024
    body_s: float = 20.0


#: Raises if a request may not come in, by what its headers say.
Look = Callable[[Headers], None]


class Gate:
    """Admits a request with its whole body, or refuses it."""

    def __init__(self, app: ASGIApp, *, looks: Sequence[Look], bounds: Bounds | None = None) -> None:
        self._app = app
        self._looks = looks
        self._bounds = bounds or Bounds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            headers = Headers(scope=scope)
            for look in self._looks:
                look(headers)
            body = await self._body(headers, receive)
        except SkepError as error:
            await answer(error)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._bounds.body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._bounds.body_s):
                return await self._whole(receive)
        except TimeoutError:
            raise TooSlow(f"the body was not there after {self._bounds.body_s:g} s", hint="send it in one go") from None

    async def _whole(self, receive: Receive) -> bytes:
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise InvalidRequest("the connection ended in the middle of the body")
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._bounds.body_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> TooLarge:
        most = self._bounds.body_bytes
        return TooLarge(
            f"the body has more than {most:,} bytes", hint="send large things as files: skep session attach"
        )


def called_by(names: Collection[str]) -> Look:
    """Refuse what calls this server by another name than a loopback one and these."""
    known = LOOPBACK | {name.lower() for name in names}

    def look(headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _name(hosts[0]) not in known:
            raise Denied(
                "no such name leads here", hint="use 127.0.0.1, or add the name to gateway.names in config.json"
            )

    return look


def from_here(headers: Headers) -> None:
    """Refuse what a page of another site asks for, whatever it brings along."""
    own = {f"{scheme}://{headers.get('host', '').lower()}" for scheme in ("http", "https")}
    foreign = any(origin.lower() not in own for origin in headers.getlist("origin"))
    if foreign or any(site not in ("same-origin", "none") for site in headers.getlist("sec-fetch-site")):
        raise Denied("a page of another site may not ask", hint="ask from a program, with the token")


def _name(host: str) -> str:
    """Return the name in a Host header without its port, in lower case."""
    name, colon, port = host.rpartition(":")
    has_port = bool(colon) and port.isascii() and port.isdigit() and not name.endswith(":")
    return (name if has_port and (not name.startswith("[") or name.endswith("]")) else host).lower()


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again
