"""Controllers of a workspace on a cloud that are killed: `python -m tests.clouds.lives HOME MECHANISM OPTIONS PHASE…`.

For each phase a life begins: it goes on with the workspace, adds a line to a file there, and at the end of that lets
go of it; but it dies by SIGKILL when it comes to the phase. Prints what each has written before it died, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from skep.sandbox.creation import MECHANISMS
from skep.sandbox.daytona.service import load
from skep.sandbox.mechanisms import Choice, Needs
from skep.workspace.manifest import Manifest
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.templates import Templates
from skep.workspace.workspaces import Workspaces

WORKSPACE = "garden"


def workspaces(home: Path, mechanism: str, options: dict[str, Any], **more: Any) -> Workspaces:
    """Open workspaces whose sandboxes are with this mechanism."""

    async def choose(_: Manifest, __: Needs) -> Choice:
        return Choice(mechanism, options if mechanism != "bubblewrap" else {})

    snapshots = Snapshots(home, Templates(home / "templates"))
    return Workspaces(home, snapshots, choose=choose, reach=lambda _: options, **more)


async def _live(home: Path, mechanism: str, options: dict[str, Any], fatal: str, telling: int) -> None:
    def pass_by(phase: str) -> None:
        if phase == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    async with workspaces(home, mechanism, options, on_phase=pass_by).hold(WORKSPACE) as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run(f"echo {fatal} >> log; sync")).ok
        os.write(telling, fatal.encode())
        if fatal == "working":
            pass_by("working")


def _lived(home: Path, mechanism: str, options: dict[str, Any], fatal: str) -> str:
    """Have one life; return what it has written, if it came to that."""
    hearing, telling = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hearing)
        asyncio.run(_live(home, mechanism, options, fatal, telling))
        os._exit(0)
    os.close(telling)
    with open(hearing, "rb") as told:
        written = told.read().decode()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (fatal, status)
    return written


if __name__ == "__main__":
    place, name, told = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    import_module(MECHANISMS[name])
    load() if name == "daytona" else import_module(name)  # the SDK, once for all lives
    print(json.dumps([_lived(place, name, told, phase) for phase in sys.argv[4:]]))
