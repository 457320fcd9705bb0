"""Steps whose model is a list of answers: they show what the loop does with what a model says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from pydantic_ai.messages import ModelMessage, ModelResponse, ModelResponsePart, TextPart, ToolCallPart

from skep.agent.actions import ExposePort, ListFiles, ReadFile
from skep.agent.conversation import Conversation, Thought
from skep.agent.desk import Desk
from skep.agent.loop import Brief, Call, Ending, Finished, Happening, Limits, Stopped, work
from skep.agent.observations import FileRead, Observation, PortExposed, Trouble
from skep.agent.tool import Tool
from skep.agent.toolbox import Toolbox
from skep.agent.tools import talk
from skep.errors import LeaseLost
from skep.governance.ruling import Policy, Ruling, rule
from skep.healing.guard import LoopGuard

Script = Sequence[Sequence[ModelResponsePart] | str | Exception]
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


async def read_file(action: ReadFile, desk: Desk) -> Observation:
    return FileRead(stamp=action.stamp, path=action.path, text=f"text of {action.path}", start=1)


async def list_files(action: ListFiles, desk: Desk) -> Observation:
    return Trouble(stamp=action.stamp, failure="tool_timeout", tool="list_files", message="it took too long")


async def expose_port(action: ExposePort, desk: Desk) -> Observation:
    return PortExposed(stamp=action.stamp, port=action.port, link="http://127.0.0.1/")


#: A file that is always there, a list that never comes, a port to ask for, and talking.
TOOLBOX = Toolbox(
    [
        Tool(ReadFile, read_file),
        Tool(ListFiles, list_files),
        Tool(ExposePort, expose_port, reach="outside"),
        *talk.TOOLS,
    ]
)


def call(tool: str, arguments: dict[str, Any] | str | None = None, /, **given: Any) -> ToolCallPart:
    return ToolCallPart(tool, given if arguments is None else arguments, tool_call_id=f"{tool}-id")


def finish(reply: str = "done") -> ToolCallPart:
    return call("finish", reply=reply, confidence=0.9)


def read(path: str = "a") -> ToolCallPart:
    return ToolCallPart("read_file", {"path": path}, tool_call_id=f"read-{path}")


@dataclass(slots=True)
class Scripted:
    """Each item of the script is the parts of one answer, a text, or an error to raise; the last one repeats."""

    script: Script
    policy: Policy = field(default_factory=Policy)
    approves: bool = True
    breaks_on: str = ""
    seen: list[list[ModelMessage]] = field(default_factory=list)
    acted: list[str] = field(default_factory=list)

    async def think(self, messages: Sequence[ModelMessage], step: int) -> Thought:
        said = self.script[min(len(self.seen), len(self.script) - 1)]
        self.seen.append(list(messages))
        if isinstance(said, Exception):
            raise said
        parts = [TextPart(said)] if isinstance(said, str) else list(said)
        at = BEGAN + timedelta(seconds=step)
        return Thought(ModelResponse(parts, timestamp=at), 100, Decimal("0.01"), at, float(step))

    async def rule(self, call: Call) -> Ruling:
        return rule(TOOLBOX.asked(call.action), self.policy)

    async def approve(self, call: Call, why: str) -> Ruling:
        return Ruling("allow", "you said yes") if self.approves else Ruling("deny", "you said no")

    async def act(self, call: Call) -> Observation:
        if call.action.kind == self.breaks_on:
            raise LeaseLost("another worker has it")
        self.acted.append(call.action.kind)
        return await TOOLBOX.perform(call.action, no_desk())


def no_desk() -> Desk:
    async def nowhere() -> Any:
        raise AssertionError("these tools need no computer")

    return Desk(nowhere)


def brief(prompt: str = "Do it.", **more: Any) -> Brief:
    talk = Conversation.begin("You are a worker.", prompt)
    return Brief(run="tsk_1", actor="worker", conversation=talk, toolbox=TOOLBOX, **more)


async def carry(
    brief: Brief, steps: Scripted, limits: Limits | None = None, each: Callable[[Happening], None] = lambda _: None
) -> tuple[list[Happening], Ending]:
    """Consume the loop; return what happened, and how it ended."""
    happened: list[Happening] = []
    ending: Ending | None = None
    async for one in work(brief, steps, limits or Limits(), LoopGuard()):
        assert ending is None, "something came after the end"
        if isinstance(one, Finished | Stopped):
            ending = one
        else:
            each(one)
            happened.append(one)
    assert ending is not None
    return happened, ending
