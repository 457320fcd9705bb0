"""The machines of a played Daytona: what they are called, which state they are in, and what stopping leaves of them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from tests.clouds.computers import ROOM, Computer

from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount

#: What is on a machine's own disk, and so survives that it is stopped.
DISK = ("/workspace", "/opt")
Tell = Callable[[str, dict[str, Any]], Awaitable[None]]


@dataclass(slots=True)
class Machine:
    """One machine of the cloud, running or not."""

    asked: Mapping[str, Any]
    computer: Computer | None = None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: str = "started"
    labels: dict[str, str] = field(default_factory=dict)
    active_at: float = field(default_factory=time.monotonic)
    auto_stop_minutes: int = 15
    #: The disk of an archived machine.
    cold: bytes = b""
    #: What to do when the machine goes, such as cutting its connections.
    cut: list[Callable[[], None]] = field(default_factory=list)
    ptys: dict[str, Any] = field(default_factory=dict)
    sessions: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def name(self) -> str:
        return self.asked.get("name") or self.id

    @property
    def throwaway(self) -> bool:
        return self.asked.get("autoDeleteInterval") == 0

    def running(self) -> Computer:
        """Return the computer, or answer as the proxy before it does when there is none."""
        if self.state != "started" or self.computer is None:
            raise refusal(
                400, "bad request: no IP address found. Is the Sandbox started?", "SANDBOX_NOT_RUNNING", "DAYTONA_PROXY"
            )
        return self.computer

    def shown(self, base: str) -> dict[str, Any]:
        """Describe it as the API does."""
        asked = self.asked
        return {
            "id": self.id,
            "organizationId": "org-1",
            "name": self.name,
            "snapshot": asked.get("snapshot"),
            "user": "root",
            "kvm": False,
            "env": asked.get("env", {}),
            "labels": self.labels,
            "public": bool(asked.get("public")),
            "networkBlockAll": bool(asked.get("networkBlockAll")),
            "networkAllowList": asked.get("networkAllowList"),
            "domainAllowList": asked.get("domainAllowList"),
            "target": asked.get("target") or "here",
            "cpu": asked.get("cpu") or 1,
            "gpu": 0,
            "memory": asked.get("memory") or 1,
            "disk": asked.get("disk") or 3,
            "state": self.state,
            "errorReason": self.error,
            "autoStopInterval": self.auto_stop_minutes,
            "autoArchiveInterval": asked.get("autoArchiveInterval") or 10080,
            "autoDeleteInterval": asked.get("autoDeleteInterval", -1),
            "volumes": asked.get("volumes", []),
            "sandboxClass": "container",
            "toolboxProxyUrl": f"{base}/toolbox",
        }


class Estate:
    """All machines and volumes of one organization."""

    def __init__(self, tell: Tell) -> None:
        self.machines: dict[str, Machine] = {}
        self.volumes: dict[str, tuple[str, str]] = {}
        self.skipped_s = 0.0
        self._tell = tell

    async def make(self, asked: Mapping[str, Any]) -> Machine:
        machine = Machine(asked, labels=dict(asked.get("labels") or {}))
        machine.auto_stop_minutes = asked.get("autoStopInterval", 15)
        machine.computer = await self._boot(machine)
        self.machines[machine.id] = machine
        return machine

    def find(self, key: str) -> Machine:
        for machine in self.machines.values():
            if key in (machine.id, machine.name):
                return machine
        raise refusal(404, f"Sandbox with ID or name {key} not found", "NOT_FOUND", "DAYTONA_API")

    async def start(self, machine: Machine) -> None:
        if machine.state == "archived":
            machine.computer = await self._boot(machine)
            await _thaw(machine)
        await self._enter(machine, "started")

    async def stop(self, machine: Machine) -> None:
        """End its processes and keep its disk; what was made to be thrown away goes altogether."""
        if machine.throwaway:
            await self.remove(machine)
            return
        if machine.state != "started" or machine.computer is None:
            raise refusal(400, "Sandbox is not started", "BAD_REQUEST", "DAYTONA_API")
        await self._enter(machine, "stopped")
        await machine.computer.sandbox.kill_all()

    async def archive(self, machine: Machine) -> None:
        if machine.state != "stopped" or machine.computer is None:
            raise refusal(400, "Sandbox is not stopped", "BAD_REQUEST", "DAYTONA_API")
        packed = await machine.computer.run(_PACK)
        assert packed.ok, packed.error_text
        machine.cold = packed.stdout
        await machine.computer.destroy()
        machine.computer = None
        await self._enter(machine, "archived")

    async def remove(self, machine: Machine, state: str = "destroyed") -> None:
        self.machines.pop(machine.id, None)
        await self._enter(machine, state)
        if machine.computer is not None:
            await machine.computer.destroy()

    async def skip(self, minutes: float) -> None:
        """Let time pass, and stop whoever was idle for too long."""
        self.skipped_s += minutes * 60
        for machine in list(self.machines.values()):
            idle_s = self.now() - machine.active_at
            if machine.state == "started" and 0 < machine.auto_stop_minutes * 60 <= idle_s:
                await self.stop(machine)

    def now(self) -> float:
        return time.monotonic() + self.skipped_s

    def volume(self, name: str) -> str:
        """Make a volume and return its id."""
        folder = tempfile.mkdtemp(prefix="skep-volume-")
        Path(folder).chmod(0o777)  # machines have users of their own, and share it
        ident = str(uuid.uuid4())
        self.volumes[ident] = (name, folder)
        return ident

    async def close(self) -> None:
        await asyncio.gather(*(self.remove(machine) for machine in list(self.machines.values())))
        for _, folder in self.volumes.values():
            shutil.rmtree(folder, ignore_errors=True)

    async def _enter(self, machine: Machine, state: str) -> None:
        was, machine.state, machine.active_at = machine.state, state, self.now()
        if state != "started":
            for cut in machine.cut:
                cut()
            machine.cut.clear()
            machine.ptys.clear()
            machine.sessions.clear()
        event = {"sandbox": {"id": machine.id, "state": state}, "oldState": was, "newState": state}
        await self._tell("sandbox.state.updated", event)

    async def _boot(self, machine: Machine) -> Computer:
        disk = tempfile.mkdtemp(prefix="skep-computer-")
        mounts = [Mount(disk, "/opt", "read-write")]
        for volume in machine.asked.get("volumes") or []:
            mounts.append(Mount(self.volumes[volume["volumeId"]][1], volume["mountPath"], "read-write"))
        sandbox = await Sandbox.create(env=machine.asked.get("env") or {}, limits=ROOM, mounts=mounts)
        return Computer(sandbox, disk)


_PACK = ["tar", "-c", "-C", "/", *(path[1:] for path in DISK)]
_UNPACK = ["tar", "-x", "-C", "/", "--no-same-owner"]


async def _thaw(machine: Machine) -> None:
    assert machine.computer is not None
    unpacked = await machine.computer.sandbox.run(_UNPACK, input=machine.cold)
    assert unpacked.ok, unpacked.error_text
    machine.cold = b""


def refusal(status: int, message: str, code: str, source: str) -> web.HTTPException:
    """Return an answer in the envelope of Daytona's errors."""
    text = web.json_response({"statusCode": status, "message": message, "code": code, "source": source}).text
    kinds: dict[int, type[web.HTTPException]] = {400: web.HTTPBadRequest, 404: web.HTTPNotFound, 409: web.HTTPConflict}
    kind = kinds.get(status, web.HTTPInternalServerError)
    return kind(text=text, content_type="application/json")
