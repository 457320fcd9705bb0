"""A workshop for tests: scripted models, and a few tools that need no sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from tests.sessions.yard import Yard

from skep.agent.actions import RunCommand, UseSkill
from skep.agent.desk import Desk
from skep.agent.observations import CommandEnded, Observation, SkillRan, Trouble
from skep.agent.tool import Tool
from skep.agent.toolbox import Toolbox
from skep.agent.tools import port, talk
from skep.errors import SandboxDisabled
from skep.models.models import Models
from skep.models.spec import ModelSpec
from skep.sessions.computer import Computer
from skep.state.database import Database
from skep.state.hives import Hive, Hives
from skep.state.leases import Leases
from skep.state.log import EventLog
from skep.tasks.worker import Worker
from skep.tasks.workshop import House, Workshop, open_worker

Perform = Callable[[Any, Desk], Awaitable[Observation]]


class Nowhere:
    """Has no computer for anybody."""

    async def resolve(self, hive: Hive, thread: str, *, account_id: str) -> Computer:
        raise SandboxDisabled("there is no sandbox here", hint="do without")


async def run_command(action: RunCommand, desk: Desk) -> Observation:
    """Do what a command would: `sleep` for ever, `fail` with exit code 1, else print it."""
    if action.command == "sleep":
        await asyncio.Event().wait()
    return CommandEnded(stamp=action.stamp, exit_code=int(action.command == "fail"), stdout=action.command)


async def use_skill(action: UseSkill, desk: Desk) -> Observation:
    """Take plain text, and refuse rich text as a service would; `broken` is what it breaks at."""
    if "broken" in action.arguments:
        return Trouble(stamp=action.stamp, failure="tool_error", tool="use_skill", message=f"it broke: {action}")
    if action.arguments == ("rich",):
        refused = "status 400: rich text is not accepted"
        return Trouble(stamp=action.stamp, failure="tool_refused", tool="use_skill", message=refused, status=400)
    return SkillRan(stamp=action.stamp, skill=action.skill, exit_code=0, status=201)


def workshop_at(yard: Yard, models: Models, **more: Any) -> Workshop:
    """Put together what a worker works with on the computers of a yard."""
    return Workshop(
        database=yard.database,
        log=yard.log,
        hives=Hives(yard.database, yard.log),
        leases=Leases(yard.database),
        sessions=yard.sessions,
        models=models,
        host="here",
        household=lambda hive: House(yard.home / "hives" / hive.id),
        **more,
    )


class Shop:
    """Opens workers over one database, with scripts that a test writes."""

    def __init__(self, database: Database, log: EventLog, folder: Path) -> None:
        self._database = database
        self._log = log
        self.folder = folder

    def open(self, script: str, *, level: str = "normal", **rest: Any) -> AbstractAsyncContextManager[Worker]:
        file = self.folder / "script.yaml"
        file.write_text(script)
        tools = (Tool(RunCommand, run_command), Tool(UseSkill, use_skill), *port.TOOLS, *talk.TOOLS)
        workshop = Workshop(
            database=self._database,
            log=self._log,
            hives=Hives(self._database, self._log),
            leases=Leases(self._database),
            sessions=Nowhere(),
            models=rest.pop("models", None) or Models([ModelSpec("rehearsal", str(file), level)]),  # type: ignore[arg-type]
            host="here",
            household=lambda hive: House(self.folder / "hives" / hive.id),
            toolbox=lambda _: Toolbox(tools),
            **rest,
        )
        return open_worker(workshop)
