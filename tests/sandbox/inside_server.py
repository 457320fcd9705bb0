"""A server for the tests of ports: run as a program it serves inside; imported it starts that, and asks it things.

What it answers depends on the path: /echo the head it was sent, /body how much body, /chunked in chunks, /to-the-end
without a length, /big?N so many megabytes, /continue after asking for the body, /upgrade in another protocol (it
repeats every byte), /stays with 200 to a request to change protocols, /nothing by hanging up, /sent how many bytes of
/big are written so far, /saw?HEX whether it was ever sent that, /lines with what is not HTTP.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skep.sandbox.ports import Exposure
    from skep.sandbox.sandbox import Sandbox

PYTHON = "/usr/bin/python3"
PORT = 8000
MEGABYTE = 1 << 20
sent = 0
seen = bytearray()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await answer_one(reader, writer):
            pass
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    head = await reader.readuntil(b"\r\n\r\n")
    seen.extend(head)
    path = head.split(b" ")[1].decode("latin-1")
    match path.partition("?")[0].strip("/"):
        case "body" | "continue":
            if path.startswith("/continue"):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            write(writer, str(await body_length(reader, head)).encode())
        case "chunked":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n4;x=y\r\n two\r\n0\r\n\r\n")
        case "to-the-end":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nto the end")
            return False
        case "big":
            await write_much(writer, int(path.partition("?")[2]))
        case "upgrade":
            key = re.search(rb"(?i)sec-websocket-key: ([^\r]+)", head)
            accept = sha1((key[1] if key else b"") + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
            writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: " + b64encode(accept) + b"\r\n\r\n"
            )
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            return False
        case "nothing":
            return False
        case "sent":
            write(writer, str(sent).encode())
        case "saw":
            write(writer, b"yes" if bytes.fromhex(path.partition("?")[2]) in seen else b"no")
        case "lines":
            writer.write(b"hello\n")
            return False
        case _:
            write(writer, head)
    await writer.drain()
    return b"connection: close" not in head.lower()


def write(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


async def write_much(writer: asyncio.StreamWriter, megabytes: int) -> None:
    global sent  # noqa: PLW0603 - one program, one counter
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (megabytes * MEGABYTE))
    for _ in range(megabytes):
        writer.write(bytes(MEGABYTE))
        await writer.drain()
        sent += MEGABYTE


async def body_length(reader: asyncio.StreamReader, head: bytes) -> int:
    total = 0
    if found := re.search(rb"(?i)content-length: (\d+)", head):
        left = int(found[1])
        while left:
            piece = await reader.read(min(left, 1 << 18))
            if not piece:
                raise ConnectionError
            left -= len(piece)
            total += len(piece)
    elif b"chunked" in head.lower():
        while size := int((await reader.readline()).strip(), 16):
            total += len(await reader.readexactly(size))
            await reader.readline()
        await reader.readline()
    return total


async def serve(host: str, port: int) -> None:
    async with await asyncio.start_server(answer, host, port) as server:
        await server.serve_forever()


@asynccontextmanager
async def served(sandbox: Sandbox, *, host: str = "127.0.0.1", port: int = PORT) -> AsyncIterator[None]:
    """Run the server in a sandbox for the length of a block."""
    await sandbox.files.write("/tmp/server.py", Path(__file__).read_bytes())
    process = await sandbox.start([PYTHON, "/tmp/server.py", host, str(port)])
    try:
        await until(lambda: _listens(sandbox, port))
        yield
    finally:
        if await sandbox.alive():
            await process.kill()
        process.release()


async def _listens(sandbox: Sandbox, port: int) -> bool:
    from skep.errors import NotFound

    try:
        (await sandbox.connect(port)).close()
    except NotFound:
        return False
    return True


async def until(question: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> None:
    """Wait until something holds; it is an error if it never does."""
    async with asyncio.timeout(within_s):
        while not await question():
            await asyncio.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    text: str


async def ask(
    exposure: Exposure,
    path: str = "/echo",
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    body: bytes | None = None,
) -> Answer:
    """Send one request by itself, with the token unless headers are given."""

    def send() -> Answer:
        connection = http.client.HTTPConnection(*address(exposure), timeout=20)
        try:
            connection.request(method, path, body, dict(exposure.headers if headers is None else headers))
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read().decode("latin-1"))
        finally:
            connection.close()

    return await asyncio.to_thread(send)


def address(exposure: Exposure) -> tuple[str, int]:
    host, _, port = exposure.url.removeprefix("http://").rstrip("/").rpartition(":")
    return host.strip("[]"), int(port)


async def talk(exposure: Exposure, *pieces: bytes) -> bytes:
    """Send bytes as they are, and return all that comes back before the other side ends."""
    reader, writer = await asyncio.open_connection(*address(exposure))
    try:
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


def request(exposure: Exposure, path: str = "/echo", *lines: str, method: str = "GET", token: bool = True) -> bytes:
    """Write the head of a request."""
    host, port = address(exposure)
    head = [f"{method} {path} HTTP/1.1", f"Host: {f'[{host}]' if ':' in host else host}:{port}", *lines]
    if token:
        head += [f"{name}: {value}" for name, value in exposure.headers.items()]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n"


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
