"""Sandboxes that stand in for machines, with a twin in each."""

from __future__ import annotations

from skep.sandbox.limits import Limits
from skep.sandbox.link import Housing, Link, armoured
from skep.sandbox.recipe import Recipe
from skep.sandbox.sandbox import Process, Sandbox
from skep.sandbox.stream import PYTHON, StreamSandbox, twin_program

TWIN = "/tmp/twin.py"


class ProcessLink(Link):
    """A link over the streams of a process in a sandbox."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def read(self) -> bytes:
        return await self._process.stdout.read()

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def close(self) -> None:
        self._process.release()


class Machine(Housing):
    """A sandbox in the place of a machine."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.id = f"machine-{sandbox.id}"

    async def alive(self) -> bool:
        return await self.sandbox.alive()

    async def end(self) -> None:
        await self.sandbox.stop()


async def start_on_machine(limits: Limits | None = None, *arguments: str) -> StreamSandbox:
    recipe = Recipe(limits=limits or Limits())
    sandbox = await Sandbox.create()
    await sandbox.files.write(TWIN, twin_program())
    process = await sandbox.start([*PYTHON, TWIN, *arguments], stdin=True)
    link: Link = ProcessLink(process)
    return await StreamSandbox.over(armoured(link) if "--armour" in arguments else link, Machine(sandbox), recipe)
