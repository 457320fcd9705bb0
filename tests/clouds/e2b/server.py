"""A cloud that speaks E2B's wire protocol on loopback: its control plane, and envd on every machine.

Run it as a program: it prints its port, and ends, with every machine, when its standard input does. Everything below
`/_control` is for tests: to break things, and to see what was asked.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from e2b.envd.filesystem.filesystem_connect import FilesystemASGIApplication
from e2b.envd.process.process_connect import ProcessASGIApplication
from tests.clouds.e2b.envd import Filesystem, Processes
from tests.clouds.e2b.machines import Fleet, Machine

from skep.errors import InvalidRequest, NotFound

KEY = "e2b_" + "0" * 40
#: What one message to envd may hold; the real one has no such bound.
_MESSAGE_BYTES = 64 << 20
_PAGE = 100
_LOG = 2000

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next requests whose method and path match."""

    match: str
    times: int = 1
    status: int = 0
    message: str = "broken on purpose"
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    #: Hang up in the middle instead of answering: after so many pieces of the body.
    cut_after: int | None = None


class Answer(Exception):
    """An answer that ends the handling of a request."""

    def __init__(self, status: int, body: object = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers or {}


def refusal(status: int, message: str) -> Answer:
    return Answer(status, {"code": status, "message": message})


class Cloud:
    """The ASGI application."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.faults: list[Fault] = []
        self.log: list[dict[str, Any]] = []
        self._processes = ProcessASGIApplication(Processes(self.fleet), read_max_bytes=_MESSAGE_BYTES)
        self._files = FilesystemASGIApplication(Filesystem(self.fleet), read_max_bytes=_MESSAGE_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        try:
            send = await self._hurt(f"{scope['method']} {scope['path']}", send)
            if scope["path"].startswith("/_control"):
                await self._control(scope, receive)
            if "e2b-sandbox-id" in headers:
                await self._envd(scope, headers, receive, send)
            else:
                await self._plan(scope, headers, receive)
        except Answer as answer:
            await _answer(send, answer)

    async def _hurt(self, request: str, send: Send) -> Send:
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.match, request):
                fault.times -= 1
                await asyncio.sleep(fault.delay_s)
                if fault.status:
                    raise Answer(fault.status, {"code": fault.status, "message": fault.message}, fault.headers)
                return send if fault.cut_after is None else _cutting(send, fault.cut_after)
        return send

    async def _control(self, scope: Scope, receive: Receive) -> None:
        words = scope["path"].split("/")[2:]
        body = json.loads(await _body(receive) or b"{}")
        match words:
            case ["faults"]:
                self.faults = [Fault(**fault) for fault in body]
            case ["log"]:
                raise Answer(200, self.log)
            case ["machines"]:
                raise Answer(
                    200,
                    [
                        {**one.described(), "asked": one.asked, "traffic": one.traffic}
                        for one in self.fleet.machines.values()
                    ],
                )
            case ["kill", machine_id]:
                await self.fleet.remove(self._machine(machine_id))
            case ["expire", machine_id]:
                self._machine(machine_id).end_at = 0
        raise Answer(204)

    async def _envd(self, scope: Scope, headers: dict[str, str], receive: Receive, send: Send) -> None:
        machine = self.fleet.machines.get(headers["e2b-sandbox-id"])
        if machine is None or not await machine.computer.running():
            raise Answer(
                502, {"sandboxId": headers["e2b-sandbox-id"], "message": "The sandbox was not found", "code": 502}
            )
        if scope["path"] == "/health":
            raise Answer(204)
        if headers.get("x-access-token") != machine.token:
            raise refusal(401, "unauthorized access, please provide a valid access token")
        if scope["path"] == "/files":
            await _transfer(machine, scope, headers, await _body(receive))
        application = self._processes if scope["path"].startswith("/process.") else self._files
        await application(scope, receive, send)

    async def _plan(self, scope: Scope, headers: dict[str, str], receive: Receive) -> None:
        data = await _body(receive)
        body = json.loads(data or b"{}")
        self.log = [*self.log[-_LOG:], {"method": scope["method"], "path": scope["path"], "body": body}]
        if headers.get("x-api-key") != KEY:
            raise refusal(401, "invalid API key")
        match scope["method"], scope["path"].strip("/").split("/"):
            case "POST", ["v2", "sandboxes"]:
                raise Answer(201, (await self.fleet.create(body)).credentials())
            case "GET", ["v2", "sandboxes"]:
                self._list(_query(scope))
            case "GET", ["volumes"]:
                raise Answer(200, [self.fleet.volume(name) for name in self.fleet.volumes])
            case "POST", ["volumes"]:
                raise Answer(201, self.fleet.volume(body["name"]))
            case "POST", ["v2", "sandboxes", machine_id, "connect"]:
                await self._connect(self._machine(machine_id), body)
            case "GET", ["sandboxes", machine_id]:
                raise Answer(200, self._machine(machine_id).described())
            case "DELETE", ["sandboxes", machine_id]:
                await self.fleet.remove(self._machine(machine_id))
                raise Answer(204)
            case "POST", ["sandboxes", machine_id, "timeout"]:
                self._machine(machine_id).end_at = time.time() + body["timeout"]
                raise Answer(204)
            case "POST", ["sandboxes", machine_id, "pause"]:
                await self._pause(self._machine(machine_id), body)
            case "PUT", ["sandboxes", machine_id, "network"]:
                network = self._machine(machine_id).asked["network"]
                self._machine(machine_id).asked["network"] = {
                    "allowPublicTraffic": network["allowPublicTraffic"],
                    **body,
                }
                raise Answer(204)
            case "GET", ["sandboxes", machine_id, "metrics"]:
                self._machine(machine_id)
                raise Answer(200, [])
        raise refusal(404, "no such path")

    def _machine(self, machine_id: str) -> Machine:
        if machine_id not in self.fleet.machines:
            raise refusal(404, f"sandbox {machine_id!r} not found")
        return self.fleet.machines[machine_id]

    def _list(self, query: dict[str, str]) -> None:
        wanted = {
            urllib.parse.unquote(name): urllib.parse.unquote(value)
            for name, value in urllib.parse.parse_qsl(query.get("metadata", ""))
        }
        states = query.get("state", "running,paused").split(",")
        found = [
            machine.described()
            for machine in self.fleet.machines.values()
            if machine.state in states and wanted.items() <= machine.asked.get("metadata", {}).items()
        ]
        start, limit = int(query.get("nextToken", "0")), int(query.get("limit", _PAGE))
        more = {"x-next-token": str(start + limit)} if len(found) > start + limit else {}
        raise Answer(200, found[start : start + limit], more)

    async def _connect(self, machine: Machine, body: dict[str, Any]) -> None:
        end_at = time.time() + body.get("timeout", 15)
        if machine.state == "running":
            machine.end_at = max(machine.end_at, end_at)
            raise Answer(200, machine.credentials())
        machine.end_at = end_at
        await machine.wake()
        raise Answer(201, machine.credentials())

    async def _pause(self, machine: Machine, body: dict[str, Any]) -> None:
        if machine.state == "paused":
            raise refusal(409, "sandbox is already paused")
        await machine.halt(memory=body.get("memory", True))
        raise Answer(204)


async def _transfer(machine: Machine, scope: Scope, headers: dict[str, str], body: bytes) -> None:
    """Serve /files: fetch one file, or put some, whole or as a form."""
    query = _query(scope)
    files = machine.computer.files
    try:
        if scope["method"] == "GET":
            raise Answer(200, await files.read(query["path"]))
        given = _form(headers["content-type"], body) if "multipart" in headers["content-type"] else [("", body)]
        names = [query.get("path") or name for name, _ in given]
        for name, (_, data) in zip(names, given, strict=True):
            await files.write(name, data)
    except NotFound as error:
        raise refusal(404, error.message) from error
    except InvalidRequest as error:
        raise refusal(400, error.message) from error
    raise Answer(200, [{"name": name.rpartition("/")[2], "type": "file", "path": name} for name in names])


def _form(kind: str, body: bytes) -> list[tuple[str, bytes]]:
    boundary = b"--" + kind.partition("boundary=")[2].strip('"').encode()
    parts = [part.removeprefix(b"\r\n").removesuffix(b"\r\n") for part in body.split(boundary)[1:-1]]
    split = [part.partition(b"\r\n\r\n") for part in parts]
    return [(_file_name(head), data) for head, _, data in split]


def _file_name(head: bytes) -> str:
    found = re.search(rb'filename="([^"]*)"', head)
    return found[1].decode() if found else ""


def _query(scope: Scope) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(scope["query_string"].decode()))


async def _body(receive: Receive) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Answer(499)
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


async def _answer(send: Send, answer: Answer) -> None:
    raw = answer.body if isinstance(answer.body, bytes) else b"" if answer.body is None else _json(answer.body)
    kind = b"application/octet-stream" if isinstance(answer.body, bytes) else b"application/json"
    headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    if answer.status != 204:
        headers += [(b"content-type", kind), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _cutting(send: Send, after: int) -> Send:
    """Pass on so many pieces of a body, and then fail, upon which the server hangs up."""
    left = after

    async def cut(message: dict[str, Any]) -> None:
        nonlocal left
        if message["type"] == "http.response.body":
            if left == 0:
                raise ConnectionResetError("cut on purpose")
            left -= 1
        await send(message)

    return cut


async def _serve() -> None:
    cloud = Cloud()
    config = uvicorn.Config(
        cloud, port=0, log_level="critical", lifespan="off", ws="none", http="h11", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    async with asyncio.TaskGroup() as group:
        clock = group.create_task(cloud.fleet.watch())
        serving = group.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        clock.cancel()
        await cloud.fleet.close()
        with suppress(asyncio.CancelledError):
            await serving


if __name__ == "__main__":
    asyncio.run(_serve())
