"""What can happen in a hive: typed, frozen events, as the log keeps them.

An event is added here, in the past tense, with its `type` as the name on disk. Once a release has
written a type, its fields keep their meaning: another meaning is another `v`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from skep.errors import Corrupt, InvalidRequest


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1] = 1


class Prompted(_Event):
    """The beekeeper asked for something."""

    type: Literal["prompted"] = "prompted"
    text: str


class Replied(_Event):
    """The hive answered."""

    type: Literal["replied"] = "replied"
    text: str


class Noted(_Event):
    """Somebody left a remark that asks for nothing."""

    type: Literal["noted"] = "noted"
    text: str


class HiveCreated(_Event):
    """A hive came to be."""

    type: Literal["hive_created"] = "hive_created"
    name: str


class HiveConfigured(_Event):
    """Settings of a hive changed; `changes` holds each changed setting with its new value."""

    type: Literal["hive_configured"] = "hive_configured"
    changes: dict[str, JsonValue]


class HiveDeleted(_Event):
    """A hive was deleted; its events stay."""

    type: Literal["hive_deleted"] = "hive_deleted"
    name: str


class Failed(_Event):
    """Something went wrong; `error` is the name of its class."""

    type: Literal["failed"] = "failed"
    error: str
    message: str


Event: TypeAlias = Prompted | Replied | Noted | HiveCreated | HiveConfigured | HiveDeleted | Failed

EVENT_TYPES: frozenset[str] = frozenset(kind.model_fields["type"].default for kind in get_args(Event))

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event in its place in the log: durable, and chained by `hash` to all before it."""

    hive_id: str
    seq: int
    at: datetime
    actor: str
    account_id: str
    task_id: str | None
    event: Event
    hash: bytes


def parse_event(data: Any) -> Event:
    """Build an event from untrusted data: a mapping with `type` and the fields of that type."""
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        raise InvalidRequest(
            f"not an event: {_first_fault(error)}", hint=f"type is one of {', '.join(sorted(EVENT_TYPES))}"
        ) from error


def recorded_event(envelope: dict[str, Any]) -> Event:
    """Build the event out of a stored record, which a Skep of this age or older has written."""
    try:
        return _ADAPTER.validate_python({**envelope["body"], "type": envelope["type"], "v": envelope["v"]})
    except ValidationError as error:
        raise Corrupt(
            f"event {envelope['seq']} of {envelope['hive']} is not readable: {_first_fault(error)}",
            hint="a newer Skep may have written it: upgrade, or look for damage with: skep events verify",
        ) from error


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in fault["loc"]) or "event"
    return f"{field[:80]}: {fault['msg'][:200]}"
