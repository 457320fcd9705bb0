"""The control API of a played Daytona: make, find, start, stop, archive and remove machines, and look into them."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from tests.clouds.daytona.machines import Estate, Machine, refusal

#: How many machines one page of a list has: few, so that whoever lists has to turn pages.
PAGE = 2
Verb = Callable[[Machine], Awaitable[None]]


class Control:
    """The routes below /api."""

    def __init__(self, estate: Estate) -> None:
        self.estate = estate
        #: Lists and answers of an organization that does not keep to what was asked of it.
        self.overruled: dict[str, Any] = {}
        #: How long a machine takes to start, and meanwhile is `starting`.
        self.start_s = 0.0
        self.links: dict[str, tuple[Machine, int]] = {}

    def routes(self) -> list[web.RouteDef]:
        estate, one = self.estate, "/api/sandbox/{key}"
        return [
            web.post("/api/sandbox", self.make),
            web.get("/api/sandbox", self.list),
            web.get(one, self.get),
            web.delete(one, self.remove),
            web.post(one + "/start", self._verb(self._start)),
            web.post(one + "/stop", self._verb(estate.stop)),
            web.post(one + "/archive", self._verb(estate.archive)),
            web.post(one + "/last-activity", self.touch),
            web.post(one + "/autostop/{minutes}", self.set_auto_stop),
            web.put(one + "/labels", self.label),
            web.get(one + "/toolbox-proxy-url", self.toolbox_url),
            web.get(one + "/ports/{port}/preview-url", self.preview),
            web.get(one + "/ports/{port}/signed-preview-url", self.signed_preview),
            web.get("/api/volumes", self.list_volumes),
            web.post("/api/volumes", self.make_volume),
            web.get("/api/volumes/by-name/{name}", self.get_volume),
            web.get("/preview/{link}/{path:.*}", self.look),
        ]

    async def make(self, request: web.Request) -> web.Response:
        asked = {**(await request.json()), **self.overruled}
        name = asked.get("name")
        if any(name and machine.name == name for machine in self.estate.machines.values()):
            raise refusal(409, f"Sandbox with name {name} already exists", "CONFLICT", "DAYTONA_API")
        machine = await self.estate.make(asked)
        if self.start_s:
            machine.state = "starting"
            request.app["tasks"].append(asyncio.create_task(self._start(machine)))
        return self._answer(request, machine)

    async def list(self, request: web.Request) -> web.Response:
        labels = json.loads(request.query.get("labels", "{}"))
        found = [
            machine.shown(_base(request))
            for machine in self.estate.machines.values()
            if labels.items() <= machine.labels.items()
        ]
        start = int(request.query.get("cursor") or 0)
        following = str(start + PAGE) if start + PAGE < len(found) else None
        return web.json_response({"items": found[start : start + PAGE], "nextCursor": following})

    async def get(self, request: web.Request) -> web.Response:
        return self._answer(request, self._machine(request))

    async def remove(self, request: web.Request) -> web.Response:
        machine = self._machine(request)
        await self.estate.remove(machine)
        return self._answer(request, machine)

    async def touch(self, request: web.Request) -> web.Response:
        self._machine(request).active_at = self.estate.now()
        return web.Response()

    async def set_auto_stop(self, request: web.Request) -> web.Response:
        machine = self._machine(request)
        machine.auto_stop_minutes = int(request.match_info["minutes"])
        return self._answer(request, machine)

    async def label(self, request: web.Request) -> web.Response:
        machine = self._machine(request)
        machine.labels = (await request.json())["labels"]
        return web.json_response({"labels": machine.labels})

    async def toolbox_url(self, request: web.Request) -> web.Response:
        return web.json_response({"url": self._machine(request).shown(_base(request))["toolboxProxyUrl"]})

    async def preview(self, request: web.Request) -> web.Response:
        machine, port = self._machine(request), int(request.match_info["port"])
        link, token = f"{port}-{machine.id}", secrets.token_hex(8)
        self.links[link + token] = (machine, port)
        answer = {"sandboxId": machine.id, "url": f"{_base(request)}/preview/{link}/", "token": token}
        return web.json_response(answer)

    async def signed_preview(self, request: web.Request) -> web.Response:
        machine, port = self._machine(request), int(request.match_info["port"])
        token = secrets.token_hex(8)
        self.links[token] = (machine, port)
        url = f"{_base(request)}/preview/{token}/"
        return web.json_response({"sandboxId": machine.id, "port": port, "token": token, "url": url})

    async def look(self, request: web.Request) -> web.Response:
        """Pass a request on to a server on the machine, for whoever has the token."""
        key = request.match_info["link"] + request.headers.get("x-daytona-preview-token", "")
        if key not in self.links:
            raise web.HTTPUnauthorized
        machine, port = self.links[key]
        connection = await machine.running().sandbox.connect(port)
        reader, writer = await asyncio.open_connection(sock=connection)
        writer.write(f"GET /{request.match_info['path']} HTTP/1.0\r\nHost: inside\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return web.Response(status=int(head.split()[1]), body=body)

    async def list_volumes(self, request: web.Request) -> web.Response:
        return web.json_response([self._volume(ident) for ident in self.estate.volumes])

    async def make_volume(self, request: web.Request) -> web.Response:
        return web.json_response(self._volume(self.estate.volume((await request.json())["name"])))

    async def get_volume(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        for ident, (called, _) in self.estate.volumes.items():
            if called == name:
                return web.json_response(self._volume(ident))
        raise refusal(404, f"Volume with name {name} not found", "NOT_FOUND", "DAYTONA_API")

    def _volume(self, ident: str) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat()
        name = self.estate.volumes[ident][0]
        times = {"createdAt": now, "updatedAt": now}
        return {"id": ident, "name": name, "organizationId": "org-1", "state": "ready", "errorReason": None, **times}

    async def _start(self, machine: Machine) -> None:
        await asyncio.sleep(self.start_s)
        await self.estate.start(machine)

    def _verb(self, verb: Verb) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            machine = self._machine(request)
            await verb(machine)
            return self._answer(request, machine)

        return handle

    def _machine(self, request: web.Request) -> Machine:
        return self.estate.find(request.match_info["key"])

    def _answer(self, request: web.Request, machine: Machine) -> web.Response:
        return web.json_response(machine.shown(_base(request)))


def _base(request: web.Request) -> str:
    return f"http://{request.host}"
