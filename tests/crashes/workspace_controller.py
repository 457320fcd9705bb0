"""A controller to be killed: changes a workspace in which a sandbox runs, and dies at a phase of its own change.

Run as `python workspace_controller.py HOME LAYERING DEED [PHASE]`; without a phase it goes on until it is killed from
outside. Each line of its standard output is a number that a command inside has written to `/workspace/log` before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import cast

from tests.crashes.workspace_deeds import open_workspaces

from skep.sandbox.sandbox import Sandbox
from skep.workspace.grounds import Layering
from skep.workspace.workspace import Workspace
from skep.workspace.workspaces import Workspaces

WRITER = "n=$(tail -n 1 log); while :; do n=$((n+1)); echo $n >> log; echo $n; done"


def die(phase: str) -> None:
    if armed and phase == sys.argv[4]:
        os.kill(os.getpid(), signal.SIGKILL)


armed: list[bool] = []


async def write(sandbox: Sandbox, number: int) -> None:
    assert (await sandbox.run(f"echo {number} >> log")).ok
    print(number, flush=True)


async def relay(sandbox: Sandbox) -> None:
    """Set a writer going, and say what it says."""
    process = await sandbox.start(WRITER)
    first = asyncio.Event()

    async def say() -> None:
        async for chunk in process.stdout:
            sys.stdout.write(chunk.decode())
            sys.stdout.flush()
            first.set()

    speaking.append(asyncio.create_task(say()))
    await first.wait()


speaking: list[asyncio.Task[None]] = []


async def checkpoint(workspace: Workspace, _: Workspaces) -> None:
    await workspace.checkpoint("late")


async def busy_checkpoint(workspace: Workspace, _: Workspaces) -> None:
    await relay(await workspace.sandbox())
    await workspace.checkpoint("late")


async def rollback(workspace: Workspace, _: Workspaces) -> None:
    await workspace.rollback("early")


async def busy_rollback(workspace: Workspace, _: Workspaces) -> None:
    await relay(await workspace.sandbox())
    await workspace.rollback("early")


async def fork(workspace: Workspace, workspaces: Workspaces) -> None:
    await workspaces.fork(workspace.id, ["child-a", "child-b"])


async def busy_fork(workspace: Workspace, workspaces: Workspaces) -> None:
    await relay(await workspace.sandbox())
    await workspaces.fork(workspace.id, ["child-a", "child-b"])


async def everything(workspace: Workspace, workspaces: Workspaces) -> None:
    """Write, keep, fork and destroy for ever."""
    for number in count(3):
        await write(await workspace.sandbox(), number)
        kept = await workspace.checkpoint()
        await write(await workspace.sandbox(), number)
        await workspaces.fork(workspace.id, [f"child-{number}"])
        await workspaces.destroy(f"child-{number}")
        await workspace.forget(kept.id)


DEEDS: dict[str, Callable[[Workspace, Workspaces], Awaitable[None]]] = {
    deed.__name__: deed for deed in (checkpoint, busy_checkpoint, rollback, busy_rollback, fork, busy_fork, everything)
}


async def main() -> None:
    home, layering, deed = Path(sys.argv[1]), cast(Layering, sys.argv[2]), sys.argv[3]
    workspaces = open_workspaces(home, layering, die if len(sys.argv) > 4 else lambda _: None)
    if not workspaces.list():
        await workspaces.create("hv-one")
    async with workspaces.hold("hv-one") as workspace:
        await write(await workspace.sandbox(), 1)
        await workspace.checkpoint("early")
        await write(await workspace.sandbox(), 2)
        armed.append(True)
        await DEEDS[deed](workspace, workspaces)
        os._exit(3)  # the phase was never reached


if __name__ == "__main__":
    asyncio.run(main())
