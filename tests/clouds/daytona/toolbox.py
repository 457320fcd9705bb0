"""The toolbox of a played machine: run commands, open terminals, move files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from aiohttp import BodyPartReader, MultipartWriter, web
from tests.clouds.computers import Computer
from tests.clouds.daytona.machines import Estate, Machine, refusal
from tests.clouds.daytona.sessions import Sessions
from tests.clouds.daytona.terminals import Terminal, environment

from skep.errors import SkepError
from skep.sandbox.files import Entry
from skep.sandbox.sandbox import Size

Handler = Callable[[web.Request, Machine, Computer], Awaitable[web.StreamResponse]]
_EXEC_S = 360


class Toolbox:
    """The routes below /toolbox/{machine}; each use of one counts as activity."""

    def __init__(self, estate: Estate) -> None:
        self.estate = estate

    def routes(self) -> list[web.RouteDef]:
        sessions = Sessions()
        table: list[tuple[str, str, Handler]] = [
            ("POST", "/process/execute", execute),
            ("GET", "/process/pty", list_terminals),
            ("GET", "/process/pty/create-connect", open_terminal),
            ("GET", "/process/pty/{id}", get_terminal),
            ("GET", "/process/pty/{id}/connect", connect_terminal),
            ("POST", "/process/pty/{id}/resize", resize_terminal),
            ("DELETE", "/process/pty/{id}", kill_terminal),
            ("POST", "/files/bulk-upload", upload),
            ("POST", "/files/bulk-download", download_many),
            ("GET", "/files/download", download),
            ("GET", "/files", list_files),
            ("GET", "/files/info", describe),
            ("POST", "/files/folder", make_folder),
            ("POST", "/files/move", move),
            ("DELETE", "/files", remove),
            ("GET", "/user-home-dir", home),
            ("GET", "/work-dir", home),
            *sessions.table(),
        ]
        return [web.route(method, "/toolbox/{machine}" + path, self._on(handler)) for method, path, handler in table]

    def _on(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            machine = self.estate.find(request.match_info["machine"])
            computer = machine.running()
            machine.active_at = self.estate.now()
            try:
                return await handler(request, machine, computer)
            except SkepError as error:
                raise refusal(error.status, error.message, _CODES.get(error.status, ""), "DAYTONA_DAEMON") from error

        return handle


_CODES = {404: "FILE_NOT_FOUND", 400: "INVALID_FILE_PATH"}


async def execute(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    asked = await request.json()
    shell = ["/bin/sh", "-c", f"exec 2>&1\n{asked['command']}"]
    process = await computer.start(shell, cwd=asked.get("cwd"), env=asked.get("envs"), user="root")
    said = bytearray()
    try:
        async with asyncio.timeout(asked.get("timeout") or _EXEC_S):
            async for chunk in process.stdout:
                said += chunk
            ended = await process.wait()
    except TimeoutError:
        await process.kill()
        raise refusal(408, "command execution timeout", "PROCESS_EXECUTION_TIMEOUT", "DAYTONA_DAEMON") from None
    finally:
        process.release()
    return web.json_response({"exitCode": ended.status, "result": said.decode(errors="replace")})


async def list_terminals(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    return web.json_response({"sessions": [terminal.shown() for terminal in machine.ptys.values()]})


async def open_terminal(request: web.Request, machine: Machine, computer: Computer) -> web.StreamResponse:
    asked = request.query
    size = Size(int(asked.get("rows", 24)), int(asked.get("cols", 80)))
    env = environment(request)
    terminal = await Terminal.open(machine, asked["id"], size=size, env=env, cwd=asked.get("cwd"))
    return await terminal.serve(machine, request)


async def get_terminal(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    return web.json_response(_terminal(request, machine).shown())


async def connect_terminal(request: web.Request, machine: Machine, computer: Computer) -> web.StreamResponse:
    return await _terminal(request, machine).serve(machine, request)


async def resize_terminal(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    asked = await request.json()
    await _terminal(request, machine).resize(Size(asked["rows"], asked["cols"]))
    return web.json_response(_terminal(request, machine).shown())


async def kill_terminal(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    await _terminal(request, machine).kill()
    return web.json_response({"message": "PTY session deleted"})


def _terminal(request: web.Request, machine: Machine) -> Terminal:
    if request.match_info["id"] not in machine.ptys:
        raise refusal(404, "PTY session not found", "NOT_FOUND", "DAYTONA_DAEMON")
    terminal: Terminal = machine.ptys[request.match_info["id"]]
    return terminal


async def upload(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    path = ""
    async for part in await request.multipart():
        assert isinstance(part, BodyPartReader)
        if part.name is not None and part.name.endswith(".path"):
            path = await part.text()
        else:
            await computer.files.write(path, bytes(await part.read()))
    return web.Response()


async def download(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    return web.Response(body=await computer.files.read(request.query["path"]))


async def download_many(request: web.Request, machine: Machine, computer: Computer) -> web.StreamResponse:
    answer = web.StreamResponse()
    with MultipartWriter("form-data") as parts:
        for path in (await request.json())["paths"]:
            name, body = await _read(computer, path)
            part = parts.append(body)
            part.set_content_disposition("form-data", quote_fields=False, name=name, filename=path)
        answer.headers["Content-Type"] = parts.headers["Content-Type"]
        await answer.prepare(request)
        await parts.write(answer)  # type: ignore[arg-type] # it has a `write`, which is all that is asked of it
    return answer


async def _read(computer: Computer, path: str) -> tuple[str, bytes]:
    try:
        return "file", await computer.files.read(path)
    except SkepError as error:
        return "error", error.message.encode()


async def list_files(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    return web.json_response([_shown(entry) for entry in await computer.files.list(request.query["path"])])


async def describe(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    return web.json_response(_shown(await computer.files.stat(request.query["path"])))


async def make_folder(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    await computer.files.mkdir(request.query["path"])
    return web.Response(status=201)


async def move(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    await computer.files.move(request.query["source"], request.query["destination"])
    return web.Response()


async def remove(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    await computer.files.remove(request.query["path"], recursive=request.query.get("recursive") == "true")
    return web.Response(status=204)


async def home(request: web.Request, machine: Machine, computer: Computer) -> web.Response:
    return web.json_response({"dir": "/workspace"})


def _shown(entry: Entry) -> dict[str, Any]:
    modified = datetime.fromtimestamp(entry.modified_at, UTC).isoformat()
    mode = f"{entry.mode:04o}"
    owner = {"owner": "root", "group": "root", "permissions": mode, "mode": mode}
    return {"name": entry.name, "isDir": entry.kind == "folder", "size": entry.size, "modTime": modified, **owner}
