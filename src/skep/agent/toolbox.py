"""The tools of a worker as one pydantic-ai toolset: described to the model, read from its calls, and performed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from pydantic import ValidationError
from pydantic_ai import ModelRetry, RunContext
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
from pydantic_core import SchemaValidator, core_schema

from skep.agent.actions import Action, InstallPackages, Stamp
from skep.agent.bounds import clip, printable
from skep.agent.conversation import show
from skep.agent.desk import Desk
from skep.agent.observations import Observation, Refused, Trouble, TroubleKind
from skep.agent.tool import Tool
from skep.agent.tools import files, packages, port, python, shell, skill, talk, web
from skep.errors import (
    Corrupt,
    DatabaseBusy,
    Defect,
    Denied,
    InvalidRequest,
    LeaseLost,
    SandboxDisabled,
    SandboxLost,
    SkepError,
)
from skep.governance.ruling import Asked, Policy, Reach, rule
from skep.workspace.snapshot.indexes import Ecosystem

#: The most that the arguments of one call may be, as JSON.
ARGUMENTS_BYTES = 256 << 10
_SUMMARY_CHARS = 300
_ANYTHING = SchemaValidator(core_schema.any_schema())


def every_tool(*, browser: bool) -> tuple[Tool, ...]:
    """Return what a worker has; the browser only where the hive has that role."""
    inside = (*shell.TOOLS, *python.TOOLS, *files.TOOLS, *skill.TOOLS)
    tools = (*inside, *packages.TOOLS, *port.TOOLS, *talk.TOOLS)
    return (*tools, *web.TOOLS) if browser else tools


class Toolbox(AbstractToolset[Desk]):
    """The tools that one hive's workers have: `browser` if it has that role, `network` if its sandbox may reach out.

    `listed` are the kinds of packages that come from hosts which a person has listed.

    As a toolset of a pydantic-ai agent, whose dependency is a `Desk`, it performs what the usual policy allows alone.
    """

    def __init__(
        self,
        tools: Iterable[Tool] | None = None,
        *,
        browser: bool = False,
        network: bool = False,
        listed: Collection[Ecosystem] = (),
    ) -> None:
        self._tools = {tool.name: tool for tool in (every_tool(browser=browser) if tools is None else tools)}
        self._network = network
        self._listed = frozenset(listed)

    @property
    def id(self) -> str:
        return "skep"

    @cached_property
    def definitions(self) -> tuple[ToolDefinition, ...]:
        """What the model is told of each tool."""
        return tuple(tool.definition for tool in self._tools.values())

    def parse(self, part: ToolCallPart, stamp: Stamp) -> Action | Trouble:
        """Read a call of a model's, which can hold anything."""
        tool = self._tools.get(part.tool_name)
        if tool is None:
            names = ", ".join(self._tools)
            message = f"there is no tool {clip(printable(part.tool_name), 64)!r}; there are: {names}"
            return _trouble(stamp, "unknown_tool", clip(printable(part.tool_name), 64), message)
        try:
            given = _arguments(part)
            if hidden := {"stamp", "kind"} & given.keys():
                raise ValueError(f"{hidden.pop()} is not an argument")
            return tool.action.model_validate({**given, "stamp": stamp})
        except ValidationError as error:
            return _trouble(stamp, "invalid_arguments", tool.name, f"{tool.name}: {_faults(error)}")
        except (ValueError, RecursionError) as error:
            return _trouble(stamp, "invalid_arguments", tool.name, f"{tool.name}: {clip(printable(str(error)), 400)}")

    def asked(self, action: Action) -> Asked:
        """Say what has to be ruled on before an act runs."""
        tool = self._tools[action.kind]
        told = action.model_dump_json(exclude={"stamp", "kind"}, exclude_defaults=True)
        return Asked(tool.name, self._reach(tool, action), f"{tool.name} {clip(told, _SUMMARY_CHARS)}")

    def _reach(self, tool: Tool, action: Action) -> Reach:
        if isinstance(action, InstallPackages):
            return "listed" if action.ecosystem in self._listed else tool.reach
        return "listed" if tool.network and self._network else tool.reach

    def repeatable(self, action: Action, desk: Desk) -> bool:
        """Say whether an act may be run again when nobody knows whether it was."""
        answer = self._tools[action.kind].repeatable
        return answer(action, desk) if callable(answer) else answer

    async def perform(self, action: Action, desk: Desk) -> Observation:
        """Do it, whatever the ruling was: that is the caller's to see to. A failure of the tool is a `Trouble`.

        A computer that is lost is looked for again by the next act.
        """
        tool = self._tools[action.kind]
        try:
            return await tool.perform(action, desk)
        except (Corrupt, Defect, DatabaseBusy, LeaseLost):
            raise  # these concern Skep itself, and no model can do anything about them
        except SkepError as error:
            if isinstance(error, SandboxLost):
                await desk.again()
            message = f"{error.message}; {error.hint}" if error.hint else error.message
            return _trouble(action.stamp, _failure(error), tool.name, clip(printable(message), 2_000))

    async def get_tools(self, ctx: RunContext[Desk]) -> dict[str, ToolsetTool[Desk]]:
        return {
            each.name: ToolsetTool(toolset=self, tool_def=each, max_retries=3, args_validator=_ANYTHING)
            for each in self.definitions
        }

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Desk], tool: ToolsetTool[Desk]
    ) -> str:
        call = ctx.tool_call_id or "call"
        stamp = Stamp(run=ctx.run_id or "run", step=ctx.run_step, call=call, at=datetime.now(UTC), actor="agent")
        action = self.parse(ToolCallPart(name, tool_args), stamp)
        if isinstance(action, Trouble):
            raise ModelRetry(action.message)
        ruling = rule(self.asked(action), Policy())
        if ruling.verdict != "allow":
            return show(Refused(stamp=stamp, why=ruling.why))
        return show(await self.perform(action, ctx.deps))


def _arguments(part: ToolCallPart) -> dict[str, Any]:
    """Return the arguments of a call as one JSON object, in which no name occurs twice."""
    text = part.args if isinstance(part.args, str) else json.dumps(part.args or {})
    if len(text) > ARGUMENTS_BYTES or len(text.encode(errors="replace")) > ARGUMENTS_BYTES:
        raise ValueError(f"the arguments are longer than {ARGUMENTS_BYTES:,} bytes; do it in several calls")
    try:
        given = json.loads(text or "{}", object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"the arguments are not JSON: {error.msg} at character {error.pos}") from error
    json.dumps(given, ensure_ascii=False).encode()  # a half of a character is a ValueError
    if not isinstance(given, dict):
        raise ValueError("the arguments have to be a JSON object")  # noqa: TRY004
    return given


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{clip(twice, 60)!r} is there twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _faults(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    told = [f"{'.'.join(map(str, fault['loc']))[:80] or 'arguments'}: {fault['msg'][:200]}" for fault in faults[:5]]
    return printable("; ".join(told))


def _failure(error: SkepError) -> TroubleKind:
    match error:
        case SandboxDisabled():
            return "sandbox_disabled"
        case SandboxLost():
            return "sandbox_lost"
        case Denied() | InvalidRequest():
            return "tool_refused"
        case _:
            return "tool_error"


def _trouble(stamp: Stamp, failure: TroubleKind, tool: str, message: str) -> Trouble:
    return Trouble(stamp=stamp, failure=failure, tool=tool, message=message)
