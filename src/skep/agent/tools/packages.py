"""Packages: tried beside the workspace, and put in its place for good if they fit."""

from __future__ import annotations

import asyncio

from skep.agent.actions import InstallPackages
from skep.agent.desk import Desk
from skep.agent.observations import Observation, PackagesInstalled
from skep.agent.tool import Tool
from skep.agent.tools.printed import trouble


async def install_packages(action: InstallPackages, desk: Desk) -> Observation:
    computer, limit_s = await desk.computer(), desk.timeout_s(action.kind)
    python, node = (action.names if action.ecosystem == one else () for one in ("python", "node"))
    try:
        async with asyncio.timeout(limit_s):
            done = await computer.install(python=python, node=node)
    except TimeoutError:
        return trouble(action, "tool_timeout", f"it was not done within {limit_s:g} s, and nothing was changed")
    versions = dict(done.python if action.ecosystem == "python" else done.node)
    notes = [] if versions else ["nothing was changed: these were there already"]
    notes += [f"a broken file was put aside as {name}" for name in done.aside]
    return PackagesInstalled(stamp=action.stamp, ecosystem=action.ecosystem, versions=versions, note="; ".join(notes))


TOOLS = (Tool(InstallPackages, install_packages, reach="outside", repeatable=True),)
