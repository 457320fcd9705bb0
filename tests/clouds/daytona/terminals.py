"""The terminals of a played machine: a login shell on each, shared by whoever connects to it by WebSocket."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from aiohttp import WSMsgType, web
from tests.clouds.daytona.machines import Machine, refusal

from skep.errors import SandboxLost
from skep.sandbox.sandbox import Process, Size

#: What one message to a terminal may have, and how many from it wait for a client before it is dropped as too slow.
READ_LIMIT, BACKLOG = 64 << 10, 256
#: How many of those are sent in one message when they wait.
_TOGETHER = 8
EXIT_CONTROL = "X-Daytona-Pty-Exit-Control"
_ENVS = "X-Daytona-Pty-Envs~"


class Terminal:
    """A shell on a terminal of its own, and the clients that see it."""

    def __init__(self, ident: str, process: Process, size: Size) -> None:
        self.id = ident
        self.process = process
        self.size = size
        self.frozen = False
        self._clients: dict[web.WebSocketResponse, asyncio.Queue[bytes]] = {}
        self._pump = asyncio.create_task(self._spread())

    @classmethod
    async def open(
        cls, machine: Machine, ident: str, *, size: Size, env: Mapping[str, str], cwd: str | None
    ) -> Terminal:
        if ident in machine.ptys:
            raise refusal(409, f"PTY session with ID '{ident}' already exists", "CONFLICT", "DAYTONA_DAEMON")
        shell = ["/bin/bash", "-i", "-l"]
        env = {"TERM": "xterm-256color", **env}
        process = await machine.running().start(shell, user="root", terminal=size, env=env, cwd=cwd)
        terminal = machine.ptys[ident] = cls(ident, process, size)
        terminal._pump.add_done_callback(lambda _: machine.ptys.pop(ident, None))
        return terminal

    def shown(self) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat()
        size = {"cols": self.size.columns, "rows": self.size.rows}
        return {"id": self.id, "active": True, "createdAt": now, "cwd": "/", "envs": {}, "lazyStart": False, **size}

    async def serve(self, machine: Machine, request: web.Request) -> web.WebSocketResponse:
        """Carry bytes both ways until the client, the shell or the machine goes."""
        client = web.WebSocketResponse(protocols=(EXIT_CONTROL,), max_msg_size=READ_LIMIT)
        await client.prepare(request)
        waiting: asyncio.Queue[bytes] = asyncio.Queue(BACKLOG)
        self._clients[client] = waiting
        transport = request.transport
        assert transport is not None
        machine.cut.append(transport.abort)
        await client.send_json({"type": "control", "status": "connected"})
        writer = asyncio.create_task(self._write(client, waiting))
        try:
            async for message in client:
                if message.type in (WSMsgType.BINARY, WSMsgType.TEXT) and not self.frozen:
                    data = message.data
                    await self.process.write(data if isinstance(data, bytes) else data.encode())
        except (SandboxLost, ConnectionError):
            pass
        finally:
            self._clients.pop(client, None)
            writer.cancel()
            if transport.abort in machine.cut:
                machine.cut.remove(transport.abort)
        return client

    async def kill(self) -> None:
        await self.process.kill()
        await asyncio.wait([self._pump])

    async def resize(self, size: Size) -> None:
        self.size = size
        await self.process.resize(size)

    async def _spread(self) -> None:
        try:
            async for chunk in self.process.stdout:
                for start in range(0, len(chunk), 32 << 10):
                    self._offer(chunk[start : start + (32 << 10)])
            status = (await self.process.wait()).status
        except SandboxLost:
            return
        finally:
            self.process.release()
        for client in list(self._clients):
            await _say_goodbye(client, status)

    def _offer(self, piece: bytes) -> None:
        for client, waiting in list(self._clients.items()):
            try:
                waiting.put_nowait(piece)
            except asyncio.QueueFull:
                self._clients.pop(client)
                asyncio.get_running_loop().create_task(client.close(code=1008, message=b"slow consumer"))

    async def _write(self, client: web.WebSocketResponse, waiting: asyncio.Queue[bytes]) -> None:
        while True:
            pieces = [await waiting.get()]
            while not waiting.empty() and len(pieces) < _TOGETHER:
                pieces.append(waiting.get_nowait())
            if not self.frozen and not client.closed:
                await client.send_bytes(b"".join(pieces))


async def _say_goodbye(client: web.WebSocketResponse, status: int) -> None:
    farewell = {"exitCode": status}
    if client.closed:
        return
    if client.ws_protocol == EXIT_CONTROL:
        await client.send_json({"type": "control", "status": "exited", **farewell})
    await client.close(code=1000 if status == 0 else 1011, message=json.dumps(farewell).encode())


def environment(request: web.Request) -> dict[str, str]:
    """Read the variables that the SDK sends as a subprotocol."""
    for protocol in request.headers.get("Sec-WebSocket-Protocol", "").split(","):
        if protocol.strip().startswith(_ENVS):
            text = protocol.strip().removeprefix(_ENVS)
            read: dict[str, str] = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            return read
    return {}
