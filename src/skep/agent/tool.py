"""One tool of a worker: what it is told to do, how far that goes, and how it is done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from pydantic_ai.tools import ToolDefinition

from skep.agent.actions import Action
from skep.agent.desk import Desk
from skep.agent.observations import Observation
from skep.governance.ruling import Reach

Perform: TypeAlias = Callable[[Any, Desk], Awaitable[Observation]]
Repeatable: TypeAlias = Callable[[Any, Desk], bool]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. `network`: it reaches out where the hive may. `repeatable`: a second run does no harm."""

    action: type[Action]
    perform: Perform
    reach: Reach = "inside"
    network: bool = False
    repeatable: bool | Repeatable = False

    @property
    def name(self) -> str:
        return str(self.action.model_fields["kind"].default)

    @property
    def definition(self) -> ToolDefinition:
        """What the model is told of it."""
        return _definition(self.action)


@cache
def _definition(action: type[Action]) -> ToolDefinition:
    schema = action.model_json_schema()
    schema.pop("$defs", None)
    schema.pop("title", None)
    schema["properties"] = {
        name: {key: value for key, value in told.items() if key != "title"}
        for name, told in schema["properties"].items()
        if name not in ("stamp", "kind")
    }
    schema["required"] = [name for name in schema["required"] if name != "stamp"]
    told = schema.pop("description", None)
    name = str(action.model_fields["kind"].default)
    return ToolDefinition(name=name, parameters_json_schema=schema, description=told, sequential=True)
