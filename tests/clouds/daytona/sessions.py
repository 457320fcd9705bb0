"""The sessions of a played machine: shells that run one command after the other, with input and kept output."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tests.clouds.computers import Computer
from tests.clouds.daytona.machines import Machine, refusal

from skep.errors import SandboxLost
from skep.sandbox.sandbox import Process, Stream

Handler = Callable[[web.Request, Machine, Computer], Awaitable[web.StreamResponse]]
_MARKS = {"stdout": b"\x01\x01\x01", "stderr": b"\x02\x02\x02"}


@dataclass(slots=True)
class Command:
    """One command of a session and what it has printed, each piece marked with the stream it came from."""

    text: str
    process: Process
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    pieces: list[tuple[str, bytes]] = field(default_factory=list)
    exit_code: int | None = None
    more: asyncio.Condition = field(default_factory=asyncio.Condition)
    task: asyncio.Task[None] | None = None

    def shown(self) -> dict[str, Any]:
        return {"id": self.id, "command": self.text, "exitCode": self.exit_code}

    def said(self, *streams: str) -> str:
        return b"".join(piece for stream, piece in self.pieces if stream in streams).decode(errors="replace")

    async def follow(self) -> None:
        """Keep what it prints until it ends."""
        try:
            streams = (self._keep("stdout", self.process.stdout), self._keep("stderr", self.process.stderr))
            await asyncio.gather(*streams)
            self.exit_code = (await self.process.wait()).status
        except SandboxLost:
            self.exit_code = -1
        finally:
            self.process.release()
        async with self.more:
            self.more.notify_all()

    async def _keep(self, name: str, stream: Stream) -> None:
        async for chunk in stream:
            self.pieces.append((name, chunk))
            async with self.more:
                self.more.notify_all()


class Sessions:
    """The routes of sessions."""

    def table(self) -> list[tuple[str, str, Handler]]:
        one = "/process/session/{id}"
        return [
            ("POST", "/process/session", self.make),
            ("GET", "/process/session", self.list),
            ("GET", one, self.get),
            ("DELETE", one, self.remove),
            ("POST", one + "/exec", self.execute),
            ("GET", one + "/command/{command}", self.command),
            ("POST", one + "/command/{command}/input", self.type),
            ("GET", one + "/command/{command}/logs", self.logs),
        ]

    async def make(self, request: web.Request, machine: Machine, computer: Computer) -> web.Response:
        ident = (await request.json())["sessionId"]
        if ident in machine.sessions:
            raise refusal(409, "session already exists", "CONFLICT", "DAYTONA_DAEMON")
        machine.sessions[ident] = {}
        return web.Response(status=201)

    async def list(self, request: web.Request, machine: Machine, computer: Computer) -> web.Response:
        return web.json_response([_shown(ident, commands) for ident, commands in machine.sessions.items()])

    async def get(self, request: web.Request, machine: Machine, computer: Computer) -> web.Response:
        return web.json_response(_shown(request.match_info["id"], _session(request, machine)))

    async def remove(self, request: web.Request, machine: Machine, computer: Computer) -> web.Response:
        for command in _session(request, machine).values():
            await command.process.kill()
        del machine.sessions[request.match_info["id"]]
        return web.Response(status=204)

    async def execute(self, request: web.Request, machine: Machine, computer: Computer) -> web.Response:
        asked, session = await request.json(), _session(request, machine)
        process = await computer.start(["/bin/sh", "-c", asked["command"]], user="root", stdin=True)
        command = Command(asked["command"], process)
        session[command.id] = command
        command.task = asyncio.create_task(command.follow())
        if asked.get("runAsync") or asked.get("async"):
            return web.json_response({"cmdId": command.id}, status=202)
        await command.task
        said = {"output": command.said("stdout", "stderr"), "exitCode": command.exit_code}
        said |= {"stdout": command.said("stdout"), "stderr": command.said("stderr")}
        return web.json_response({"cmdId": command.id, **said})

    async def command(self, request: web.Request, machine: Machine, computer: Computer) -> web.Response:
        return web.json_response(_command(request, machine).shown())

    async def type(self, request: web.Request, machine: Machine, computer: Computer) -> web.Response:
        await _command(request, machine).process.write((await request.json())["data"].encode())
        return web.Response(status=204)

    async def logs(self, request: web.Request, machine: Machine, computer: Computer) -> web.StreamResponse:
        command = _command(request, machine)
        if request.headers.get("Upgrade", "").lower() != "websocket":
            said = {"stdout": command.said("stdout"), "stderr": command.said("stderr")}
            return web.json_response({"output": command.said("stdout", "stderr"), **said})
        client, sent = web.WebSocketResponse(), 0
        await client.prepare(request)
        while not client.closed and (sent < len(command.pieces) or command.exit_code is None):
            for stream, piece in command.pieces[sent:]:
                await client.send_bytes(_MARKS[stream] + piece)
                sent += 1
            async with command.more:
                if sent == len(command.pieces) and command.exit_code is None:
                    await command.more.wait()
        await client.close()
        return client


def _session(request: web.Request, machine: Machine) -> dict[str, Command]:
    if request.match_info["id"] not in machine.sessions:
        raise refusal(404, "session not found", "NOT_FOUND", "DAYTONA_DAEMON")
    session: dict[str, Command] = machine.sessions[request.match_info["id"]]
    return session


def _command(request: web.Request, machine: Machine) -> Command:
    session = _session(request, machine)
    if request.match_info["command"] not in session:
        raise refusal(404, "command not found", "NOT_FOUND", "DAYTONA_DAEMON")
    return session[request.match_info["command"]]


def _shown(ident: str, commands: dict[str, Command]) -> dict[str, Any]:
    return {"sessionId": ident, "commands": [command.shown() for command in commands.values()]}
