"""Serve a port of a session's sandbox behind a signed link that is good for a short while.

The link is checked at a door of its own, which leads whoever comes with a good one on to the exposed port. It says
nothing about who they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from skep.errors import Denied
from skep.sandbox.sandbox import Sandbox
from skep.sessions.links import Links

_HEAD_BYTES = 16 << 10
_HEAD_S = 10.0
_MOST_VISITS = 64
_PATH = "/preview/"

Now = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Preview:
    """A link that leads to the port for as long as it is good."""

    link: str
    expires_at: float


@asynccontextmanager
async def serving(
    sandbox: Sandbox, links: Links, session_id: str, port: int, *, ttl_s: float, now: Now = time.time
) -> AsyncIterator[Preview]:
    """Serve a port until the end of the block, to whoever has the link."""
    token = links.make(session_id, port, ttl_s=ttl_s, now=now())
    expires_at = links.read(token, now()).expires_at
    async with await sandbox.expose(port) as exposure:
        door = _Door(links, session_id, port, exposure.link, now)
        server = await asyncio.start_server(door.answer, "127.0.0.1", 0, limit=_HEAD_BYTES)
        async with server:
            number = server.sockets[0].getsockname()[1]
            yield Preview(f"http://127.0.0.1:{number}{_PATH}{token}", expires_at)


@dataclass(slots=True)
class _Door:
    links: Links
    session_id: str
    port: int
    beyond: str
    now: Now
    _visits: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._visits += 1
        try:
            if self._visits <= _MOST_VISITS:
                async with asyncio.timeout(_HEAD_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._reply(head.split(b"\r\n", 1)[0].decode("latin-1")))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a visitor who is none, or has gone
        finally:
            self._visits -= 1
            writer.close()

    def _reply(self, line: str) -> bytes:
        method, _, rest = line.partition(" ")
        target = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD") or not target.startswith(_PATH):
            return _response("404 Not Found", "There is nothing here; open the link of the preview.")
        try:
            self.links.read(target.removeprefix(_PATH), self.now(), session_id=self.session_id, port=self.port)
        except Denied as denied:
            return _response("403 Forbidden", f"{denied.message}: {denied.hint}")
        return _response("303 See Other", "", f"Location: {self.beyond}\r\n")


def _response(status: str, text: str, more: str = "") -> bytes:
    body = f"{text}\n".encode()
    return (
        f"HTTP/1.1 {status}\r\n{more}Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        "Referrer-Policy: no-referrer\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    ).encode() + body
