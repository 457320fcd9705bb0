"""The machines of the played E2B: what its control plane knows about each, and what runs on it."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tests.clouds.computers import Computer

from skep.errors import SandboxLost
from skep.sandbox.sandbox import Process

ENVD_VERSION = "0.6.8"
#: How many pieces of output wait for a reader before the program has to.
_AHEAD = 4
Piece = tuple[Literal["stdout", "stderr", "pty"], bytes]


@dataclass(slots=True)
class Running:
    """A process started through envd. Output that comes while nobody listens is lost, as it is there."""

    process: Process
    argv: list[str]
    terminal: bool = False
    listeners: list[asyncio.Queue[Piece | None]] = field(default_factory=list)
    pump: asyncio.Task[None] | None = None

    def listen(self) -> AsyncIterator[Piece]:
        """Yield the output from now on, to the end of the process."""
        queue: asyncio.Queue[Piece | None] = asyncio.Queue(_AHEAD)
        self.listeners.append(queue)
        return self._heard(queue)

    async def _heard(self, queue: asyncio.Queue[Piece | None]) -> AsyncIterator[Piece]:
        try:
            while (piece := await queue.get()) is not None:
                yield piece
        finally:
            self.listeners.remove(queue)
            while not queue.empty():  # a pump that waits for room here must not wait for ever
                queue.get_nowait()

    async def pass_on(self) -> None:
        """Carry the output to whoever listens, until the process has ended."""

        async def move(name: Literal["stdout", "stderr", "pty"], stream: Any) -> None:
            async for chunk in stream:
                await self._tell((name, chunk))

        try:
            await asyncio.gather(
                move("pty" if self.terminal else "stdout", self.process.stdout), move("stderr", self.process.stderr)
            )
            await self.process.wait()
        except SandboxLost:
            return
        await self._tell(None)
        self.process.release()

    async def _tell(self, piece: Piece | None) -> None:
        for queue in list(self.listeners):
            await queue.put(piece)


@dataclass(slots=True)
class Machine:
    """A machine as the control plane keeps it. What it was asked for at creation stays in `asked`."""

    computer: Computer
    asked: dict[str, Any]
    end_at: float
    id: str = field(default_factory=lambda: "i" + secrets.token_hex(10))
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    traffic: str = field(default_factory=lambda: secrets.token_hex(16))
    started_at: float = field(default_factory=time.time)
    running: dict[int, Running] = field(default_factory=dict)
    #: Set when the machine is halted or gone, which cuts every stream from it; another comes with the next waking.
    cut: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> str:
        return "paused" if self.computer.halted else "running"

    @property
    def public(self) -> bool:
        return bool(self.asked.get("network", {}).get("allowPublicTraffic", True))

    async def halt(self, *, memory: bool = True) -> None:
        await self.computer.halt()
        self.cut.set()
        if not memory:
            await self.computer.sandbox.kill_all()
            self.running.clear()

    async def wake(self) -> None:
        await self.computer.wake()
        self.cut = asyncio.Event()

    async def destroy(self) -> None:
        self.cut.set()
        await self.computer.destroy()
        for one in self.running.values():
            if one.pump is not None:
                one.pump.cancel()

    def described(self) -> dict[str, Any]:
        return {
            "templateID": self.asked["templateID"],
            "sandboxID": self.id,
            "clientID": "loopback",
            "startedAt": _moment(self.started_at),
            "endAt": _moment(self.end_at),
            "envdVersion": ENVD_VERSION,
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 1024,
            "state": self.state,
            "metadata": self.asked.get("metadata", {}),
            "network": self.asked.get("network", {}),
        }

    def credentials(self) -> dict[str, Any]:
        return {
            "templateID": self.asked["templateID"],
            "sandboxID": self.id,
            "clientID": "loopback",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.token,
            "trafficAccessToken": None
            if self.asked.get("network", {}).get("allowPublicTraffic", True)
            else self.traffic,
            "domain": "e2b.test",
        }


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


@dataclass(slots=True)
class Fleet:
    """Every machine of the cloud, and the clock that stops those whose time is up."""

    machines: dict[str, Machine] = field(default_factory=dict)
    #: The folder of each volume, by its name.
    volumes: dict[str, str] = field(default_factory=dict)

    async def create(self, asked: dict[str, Any]) -> Machine:
        shown = {self.volumes[one["name"]]: one["path"] for one in asked.get("volumeMounts") or ()}
        computer = await Computer.boot(asked.get("envVars"), shown)
        machine = Machine(computer, asked, time.time() + asked.get("timeout", 15))
        self.machines[machine.id] = machine
        return machine

    async def remove(self, machine: Machine) -> None:
        del self.machines[machine.id]
        await machine.destroy()

    async def watch(self) -> None:
        """Stop machines whose time is up, for as long as the cloud runs."""
        while True:
            for machine in list(self.machines.values()):
                if machine.end_at < time.time() and not machine.computer.halted:
                    await (machine.halt() if machine.asked.get("autoPause") else self.remove(machine))
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        for machine in list(self.machines.values()):
            await self.remove(machine)
        for folder in self.volumes.values():
            shutil.rmtree(folder, ignore_errors=True)

    def volume(self, name: str) -> dict[str, str]:
        """Make a volume unless it is there; return what is told of it."""
        if name not in self.volumes:
            self.volumes[name] = tempfile.mkdtemp(prefix="skep-volume-")
            Path(self.volumes[name]).chmod(0o777)  # machines have users of their own, and share it
        return {"volumeID": f"vol-{name}", "name": name, "token": "t"}
