"""Daytona on loopback: `python -m tests.clouds.daytona.server KEY` prints its address and serves until its input ends.

Whoever plays with it has a few routes more, below /play: make requests fail, let time pass, break a machine.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import socketio  # type: ignore[import-untyped] # it has no stubs
from aiohttp import web
from tests.clouds.daytona.control import Control
from tests.clouds.daytona.machines import Estate
from tests.clouds.daytona.toolbox import Toolbox

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Daytona:
    """The whole service."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.faults: list[dict[str, Any]] = []
        self.seen: list[str] = []
        self.events = socketio.AsyncServer(async_mode="aiohttp", logger=False, engineio_logger=False)
        self.events.on("connect", self._greet)
        self.estate = Estate(self.events.emit)
        self.control = Control(self.estate)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.gate], client_max_size=64 << 20)
        app["tasks"] = []
        self.events.attach(app, socketio_path="api/socket.io")
        app.add_routes([*self.control.routes(), *Toolbox(self.estate).routes()])
        app.add_routes([web.post("/play/{act}", self.play)])
        return app

    @web.middleware
    async def gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in whoever has the key, unless a fault is due."""
        open_to_all = request.path.startswith(("/api/socket.io", "/preview/"))
        if not open_to_all and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"statusCode": 401, "message": "Invalid credentials"}, status=401)
        if request.path.startswith("/play/"):
            return await handler(request)
        name = f"{request.method} {request.path}"
        self.seen.append(name)
        if (fault := self._due(name)) is not None:
            return await _fail(request, fault)
        return await handler(request)

    def _due(self, name: str) -> dict[str, Any] | None:
        for fault in self.faults:
            if re.fullmatch(fault["on"], name):
                fault["times"] -= 1
                if fault["times"] <= 0:
                    self.faults.remove(fault)
                return fault
        return None

    def _greet(self, client: str, environ: object, auth: dict[str, str] | None) -> bool:
        return (auth or {}).get("token") == self.key

    async def play(self, request: web.Request) -> web.Response:
        asked = await request.json()
        match request.match_info["act"]:
            case "fail":
                self.faults.append(asked)
            case "mend":
                self.faults.clear()
            case "pass":
                await self.estate.skip(asked["minutes"])
            case "overrule":
                self.control.overruled, self.control.start_s = asked["answers"], asked["start_s"]
            case "destroy":
                await self.estate.remove(self.estate.find(asked["id"]))
            case "cut":
                for cut in self.estate.find(asked["id"]).cut:
                    cut()
            case "freeze":
                self._freeze(asked["id"])
            case "seen":
                return web.json_response(self.seen)
            case "machines":
                return web.json_response([machine.shown("") for machine in self.estate.machines.values()])
        return web.json_response({})

    def _freeze(self, ident: str) -> None:
        """Keep its connections open and carry nothing over them, as with a machine that fell off the network."""
        machine = self.estate.find(ident)
        for terminal in machine.ptys.values():
            terminal.frozen = True
        machine.cut.clear()


async def _fail(request: web.Request, fault: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(fault.get("delay_s", 0))
    if fault.get("drop") and request.transport is not None:
        request.transport.abort()
    status = fault.get("status", 500)
    body = {"statusCode": status, "message": f"played failure {status}", "code": "PLAYED", "source": "DAYTONA_API"}
    return web.json_response(body, status=status, headers=fault.get("headers"))


async def main(key: str) -> None:
    daytona = Daytona(key)
    runner = web.AppRunner(daytona.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await daytona.estate.close()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
