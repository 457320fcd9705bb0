"""A small service on this machine that takes posts: what the demo's hive talks to, over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_RICH = re.compile(r"(^#{1,6} )|\*\*|\*\S|<[a-z]+>", re.MULTILINE)
_MOST_BYTES = 64 << 10
_WAIT_S = 10


@dataclass(slots=True)
class Board:
    """The posts that were taken, by the key of the request, so that one that is sent twice is there once."""

    posts: dict[str, str] = field(default_factory=dict)
    address: str = ""

    def take(self, key: str, text: str) -> tuple[int, str]:
        """Return the status and what is said about it."""
        if _RICH.search(text):
            return 400, "rich text is not accepted: send plain text"
        self.posts.setdefault(key, text)
        return 201, f"post {len(self.posts)} is out"


@asynccontextmanager
async def open_board() -> AsyncIterator[Board]:
    """Serve a board on a free port of this machine until the block ends."""
    board = Board()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_WAIT_S):
                await _answer(board, reader, writer)
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
            pass  # whoever does not speak properly gets no answer
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=_MOST_BYTES)
    board.address = "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
    async with server:
        yield board


async def _answer(board: Board, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
    body = json.loads(await reader.readexactly(min(int(fields.get("content-length", "0")), _MOST_BYTES)))
    status, message = board.take(fields.get("idempotency-key", ""), str(body["text"]))
    told = json.dumps({"message": message}).encode()
    writer.write(
        f"HTTP/1.1 {status} {message}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(told)}\r\nConnection: close\r\n\r\n".encode()
        + told
    )
    await writer.drain()
