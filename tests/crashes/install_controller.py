"""A controller to be killed: installs packages into a workspace, or repairs it, and dies at a phase of that.

Run as `python install_controller.py HOME PORT LAYERING WORKSPACE DEED [PHASE]`; without a phase it goes on to the end,
unless it is killed from outside.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import cast

from tests.workspace.market import HOST

from skep.workspace.grounds import Layering
from skep.workspace.health.repair import repair
from skep.workspace.packages.packages import install, settle
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.templates import Templates
from skep.workspace.workspaces import Workspaces

PACKAGES = {"install": (["pear", "sourced"], ["pear"]), "python": (["pear"], []), "heavy": (["heavy"], [])}


def die(phase: str) -> None:
    if phase == (sys.argv[6:] or [""])[0]:
        os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    home, port, layering, workspace_id, deed = Path(sys.argv[1]), *sys.argv[2:6]
    indexes = Indexes(f"http://{HOST}/simple/", f"http://{HOST}/npm/", {HOST: f"127.0.0.1:{port}"})
    snapshots = Snapshots(home, Templates(home / "templates"), indexes=indexes)
    workspaces = Workspaces(home, snapshots, layering=cast(Layering, layering), settle=[settle], on_phase=die)
    if deed == "repair":
        await repair(workspaces, workspace_id, indexes=indexes, cache=snapshots.cache)
        return
    python, node = PACKAGES[deed]
    async with workspaces.hold(workspace_id) as workspace:
        await install(workspace, python=python, node=node, indexes=indexes, cache=snapshots.cache)


asyncio.run(main())
