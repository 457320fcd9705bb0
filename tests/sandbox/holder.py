"""A process that holds sandboxes for others: python holder.py FOLDER. It is asked through a door in that folder."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from skep.errors import NotFound
from skep.sandbox.bubblewrap import BubblewrapSandbox
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox
from skep.workspace.door import Answer, Door


class Holder:
    """Makes a sandbox for whoever asks, and stops it when nobody uses it any more."""

    def __init__(self) -> None:
        self._sandboxes: dict[str, Sandbox] = {}
        self._ends: set[asyncio.Task[None]] = set()

    async def respond(self, request: dict[str, Any]) -> Answer:
        match request["act"]:
            case "make":
                return await self._make(Limits(**request["limits"]) if request["limits"] else None)
            case "join":
                return await self._join(self._sandbox(request))
            case "destroy":
                _kill_agent(self._sandbox(request))
            case "kill_all":
                await self._sandbox(request).kill_all()
            case "count":
                return Answer({"fds": sum(1 for _ in Path("/proc/self/fd").iterdir())})
            case "guests":
                return Answer({"guests": self._sandbox(request).guests})
        return Answer({})

    def _sandbox(self, request: dict[str, Any]) -> Sandbox:
        if request["id"] not in self._sandboxes:
            raise NotFound(f"no sandbox {request['id']}")
        return self._sandboxes[request["id"]]

    async def _make(self, limits: Limits | None) -> Answer:
        sandbox = await Sandbox.create(limits=limits)
        self._sandboxes[sandbox.id] = sandbox
        answer = await self._join(sandbox)
        end = asyncio.create_task(self._end(sandbox))
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)
        return answer

    async def _join(self, sandbox: Sandbox) -> Answer:
        return Answer(sandbox.introduction(), ((await sandbox.admit()).detach(),))

    async def _end(self, sandbox: Sandbox) -> None:
        await sandbox.alone()
        await sandbox.stop()
        del self._sandboxes[sandbox.id]


def _kill_agent(sandbox: Sandbox) -> None:
    assert isinstance(sandbox, BubblewrapSandbox)
    outer = sandbox.launcher.pid
    (inner,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    os.kill(int(inner), signal.SIGKILL)


async def main(folder: Path) -> None:
    async with await Door.open(folder, Holder().respond):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
