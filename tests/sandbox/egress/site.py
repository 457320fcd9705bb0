"""A web server on loopback for tests: as lenient as the worst, and open about whom it was asked for.

It reads lines that end in a bare line feed, takes the last of two headers, believes a length where chunks are
announced, and skips what it does not understand. So whatever a proxy lets through by mistake, it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from skep.sandbox.egress.tls import Authority, new_authority

_REQUEST = re.compile(rb"([A-Za-z]+) (\S+) HTTP/\S+\r?\n")
BIG = 1 << 20


@dataclass(slots=True)
class Seen:
    """One request as the server understood it."""

    host: str
    path: str
    head: bytes
    body: bytes = b""


@dataclass(slots=True)
class Site:
    """Two ports of one server: plain and with TLS, for any name."""

    port: int = 0
    tls_port: int = 0
    trust: bytes = b""
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    #: The headers of earlier requests, for whoever asks for /stored.
    stored: bytes = b""
    _serving: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def tls_address(self) -> str:
        return f"127.0.0.1:{self.tls_port}"

    async def hang_up(self) -> None:
        """Close all connections."""
        serving = dict(self._serving)
        for task, writer in serving.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        task.add_done_callback(self._serving.pop)
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, ValueError, asyncio.CancelledError):
            while await self._serve_one(reader, writer):
                pass
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readline()
        if not line:
            return False
        if line.startswith(b"PRI * HTTP/2.0"):
            writer.write(b"REACHED h2 ")
            await writer.drain()
            return True
        if (request := _REQUEST.fullmatch(line)) is None:
            return True  # skipped
        head = line
        while (more := await reader.readline()).strip(b"\r\n"):
            head += more
        fields = _fields(head)
        path = request[2].decode("latin-1")
        host = path.split("/")[2] if "://" in path else fields.get("host", "nobody")
        seen = Seen(host, path, head, await _body(reader, fields, is_new=b"HTTP/1.1" in line))
        self.seen.append(seen)
        return await self._answer(seen, fields, writer)

    async def _answer(self, seen: Seen, fields: dict[str, str], writer: asyncio.StreamWriter) -> bool:  # noqa: PLR0912
        text = b"REACHED " + seen.host.encode() + b" " + seen.head + seen.body
        path = "/" + seen.path.rpartition("/")[2]
        match path.partition("?")[0]:
            case "/redirect":
                writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://denied.test/\r\nContent-Length: 0\r\n\r\n")
            case "/upgrade" if "upgrade" in fields:
                writer.write(b"HTTP/1.1 101 Switching\r\nUpgrade: any\r\nConnection: upgrade\r\n\r\n" + text)
            case "/chunks":
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for at in range(0, len(text), 3):
                    piece = text[at : at + 3]
                    writer.write(b"%x;extension\r\n%b\r\n" % (len(piece), piece))
                writer.write(b"0\r\nX-Trailer: %b\r\n\r\n" % seen.head.splitlines()[-1])
            case "/drip":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text))
                for byte in text:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0)
            case "/header":
                echo = b"; ".join(seen.head.splitlines())
                writer.write(b"HTTP/1.1 200 OK\r\nX-Echo: %b\r\nContent-Length: 2\r\n\r\nok" % echo)
            case "/gzip":
                packed = gzip.compress(text)
                lengths = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
                writer.write(b"HTTP/1.1 200 OK\r\n" + lengths + packed)
            case "/store":
                self.stored += seen.head
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            case "/stored":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(self.stored), self.stored))
            case "/to-the-end":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + text)
                await writer.drain()
                return False
            case "/endless":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(bytes(64 << 10))
                    await writer.drain()
            case "/big":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (BIG, b"b" * BIG))
            case "/promised":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nnot all of it")
                await writer.drain()
                await asyncio.sleep(30)
            case "/silent":
                await asyncio.sleep(30)
            case _:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
        await writer.drain()
        return True


def _fields(head: bytes) -> dict[str, str]:
    pairs = [line.strip().partition(b":") for line in head.splitlines()[1:]]
    # A name with a blank behind it is another name to some.
    return {name.decode("latin-1").lower(): text.strip().decode("latin-1") for name, _, text in pairs}


async def _body(reader: asyncio.StreamReader, fields: dict[str, str], *, is_new: bool) -> bytes:
    if "content-length" in fields:
        return await reader.readexactly(int(fields["content-length"]))
    if fields.get("transfer-encoding") != "chunked" or not is_new:
        return b""
    body = b""
    while size := int((await reader.readline()).partition(b";")[0].strip() or b"0", 16):
        body += await reader.readexactly(size)
        if (await reader.read(1)) == b"\r":
            await reader.read(1)
    while (await reader.readline()).strip(b"\r\n"):
        pass
    return body


@asynccontextmanager
async def running_site(
    *, name: str = "allowed.test", authority: tuple[bytes, bytes] | None = None
) -> AsyncIterator[Site]:
    """Run a server on loopback whose certificate is for one name; its address is pinned to other names as well."""
    key, certificate = authority or new_authority()
    site = Site(trust=certificate)
    context: ssl.SSLContext = Authority(key, certificate).context(name)
    plain = await asyncio.start_server(site.serve, "127.0.0.1", 0, limit=4 << 20)
    secure = await asyncio.start_server(site.serve, "127.0.0.1", 0, limit=4 << 20, ssl=context)
    site.port, site.tls_port = (server.sockets[0].getsockname()[1] for server in (plain, secure))
    try:
        yield site
    finally:
        plain.close()
        secure.close()
        await site.hang_up()
