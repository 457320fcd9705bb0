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
    """The beekeeper asked for something, in a thread."""

    type: Literal["prompted"] = "prompted"
    text: str
    thread: str | None = None


class Replied(_Event):
    """The hive answered; `scripted`: no model was asked.

    `partial`: a limit ended the work before it was done, or some of the tasks of a plan did not succeed.
    """

    type: Literal["replied"] = "replied"
    text: str
    confidence: float | None = None
    partial: bool = False
    scripted: bool = False


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


class WorkspaceCreated(_Event):
    """The hive got its workspace; `snapshot` is the version of the template that lies below it."""

    type: Literal["workspace_created"] = "workspace_created"
    template: str
    snapshot: str | None


class Checkpointed(_Event):
    """A state of the workspace was kept."""

    type: Literal["checkpointed"] = "checkpointed"
    checkpoint: str
    name: str | None
    note: str


class RolledBack(_Event):
    """The workspace went back to a checkpoint; `left` is the checkpoint of the state that was left."""

    type: Literal["rolled_back"] = "rolled_back"
    checkpoint: str
    left: str


class PackagesInstalled(_Event):
    """Packages were added to the workspace, as they were asked for."""

    type: Literal["packages_installed"] = "packages_installed"
    python: tuple[str, ...] = ()
    node: tuple[str, ...] = ()


class WorkspaceRepaired(_Event):
    """The environment of the workspace was put right; `left` is what still is not."""

    type: Literal["workspace_repaired"] = "workspace_repaired"
    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class WorkspaceForked(_Event):
    """Other workspaces came to be that begin where this one is."""

    type: Literal["workspace_forked"] = "workspace_forked"
    into: tuple[str, ...]


class WorkspaceArchived(_Event):
    """The workspace was saved to the store of archives."""

    type: Literal["workspace_archived"] = "workspace_archived"
    archive: str


class WorkspaceRestored(_Event):
    """The workspace came back from an archive."""

    type: Literal["workspace_restored"] = "workspace_restored"
    archive: str


class WorkspaceDestroyed(_Event):
    """The workspace was removed; `archive` is what is left of it, if it was saved first."""

    type: Literal["workspace_destroyed"] = "workspace_destroyed"
    archive: str | None


class SessionChanged(_Event):
    """The session of a key came into another status; `before` is null for a new one."""

    type: Literal["session_changed"] = "session_changed"
    session: str
    key: str
    before: str | None
    after: str
    reason: str
    generation: int


class SessionWarned(_Event):
    """A session is going to be deleted unless it is used before."""

    type: Literal["session_warned"] = "session_warned"
    session: str
    key: str
    delete_at: str


class RoomReplaced(_Event):
    """A shell or a code context was gone, and got a replacement without its variables."""

    type: Literal["room_replaced"] = "room_replaced"
    session: str
    kind: Literal["shell", "context"]
    name: str


class FallbackChosen(_Event):
    """A sandbox was made by another mechanism than the one that was wanted, for this reason."""

    type: Literal["fallback_chosen"] = "fallback_chosen"
    mechanism: str
    instead_of: str
    why: str


class OutageBegan(_Event):
    """Sandboxes cannot be had: the hive goes on without."""

    type: Literal["outage_began"] = "outage_began"
    since: str
    message: str


class OutageEnded(_Event):
    """Sandboxes can be had again."""

    type: Literal["outage_ended"] = "outage_ended"


class AccessDenied(_Event):
    """Somebody asked for a session that is not theirs."""

    type: Literal["access_denied"] = "access_denied"
    session: str
    asked_by: str
    act: str


class AttachmentsReceived(_Event):
    """Files came with a prompt; `refused` are those that could not be taken, with the reason."""

    type: Literal["attachments_received"] = "attachments_received"
    session: str
    files: tuple[dict[str, JsonValue], ...] = ()
    refused: tuple[dict[str, JsonValue], ...] = ()


class ArtifactsCollected(_Event):
    """Files that the agent made for the user were collected."""

    type: Literal["artifacts_collected"] = "artifacts_collected"
    session: str
    files: tuple[dict[str, JsonValue], ...] = ()
    skipped: tuple[dict[str, JsonValue], ...] = ()


class TaskStarted(_Event):
    """A worker began a task, or took it over; `start` counts from 1."""

    type: Literal["task_started"] = "task_started"
    worker: str
    start: int


class TaskForked(_Event):
    """A task came to be that begins where another was after a step; `step` 0: the other is tried anew."""

    type: Literal["task_forked"] = "task_forked"
    origin: str
    step: int


class TaskEnded(_Event):
    """A task came to its end, whichever; there is one of these for every task."""

    type: Literal["task_ended"] = "task_ended"
    status: Literal["succeeded", "failed", "cancelled"]
    why: str


class CancelAsked(_Event):
    """Somebody wants a task to end at once."""

    type: Literal["cancel_asked"] = "cancel_asked"
    why: str


class Classified(_Event):
    """The queen decided how to go about a prompt: a simple reply, one task or many."""

    type: Literal["classified"] = "classified"
    kind: Literal["reply", "one", "many"]
    why: str


class Planned(_Event):
    """The queen split a prompt into tasks, each with its id, title and those that come before it."""

    type: Literal["planned"] = "planned"
    tasks: tuple[dict[str, JsonValue], ...]


class Gathered(_Event):
    """The tasks of a plan have ended; they are named by their ids."""

    type: Literal["gathered"] = "gathered"
    tasks: tuple[str, ...]


class ModelCalled(_Event):
    """A model answered; `usd` is null where the price of the call is not known.

    `passed_over` names the models that were asked before it, each with why it did not answer.
    """

    type: Literal["model_called"] = "model_called"
    role: str
    provider: str
    model: str
    input_tokens: int
    output_tokens: int
    usd: float | None
    duration_ms: int
    passed_over: tuple[str, ...] = ()


class Proposed(_Event):
    """The worker wants to act; `text` is what it said about it."""

    type: Literal["proposed"] = "proposed"
    run: str
    step: int
    call: str
    action: dict[str, JsonValue]
    text: str = ""


class Ruled(_Event):
    """It was decided whether a proposed act may run; nothing runs before this is on record."""

    type: Literal["ruled"] = "ruled"
    run: str
    step: int
    call: str
    ruling: Literal["allow", "ask", "deny"]
    why: str


class Observed(_Event):
    """An act came to its end, and this is what came of it."""

    type: Literal["observed"] = "observed"
    run: str
    step: int
    call: str
    observation: dict[str, JsonValue]


class Asked(_Event):
    """A person is asked: for an answer, or whether an act may run. Without one by then it counts as a no."""

    type: Literal["asked"] = "asked"
    call: str
    kind: Literal["question", "approval"]
    question: str
    choices: tuple[str, ...] = ()
    until: str


class Answered(_Event):
    """A person answered what was asked."""

    type: Literal["answered"] = "answered"
    call: str
    answer: str


class LoopWarned(_Event):
    """The worker goes round in circles, and was told so."""

    type: Literal["loop_warned"] = "loop_warned"
    run: str
    step: int
    pattern: str
    guidance: str


class Healed(_Event):
    """A failure was met with a remedy; `tier` 1 is a rule, 2 a reflection, 3 an honest note."""

    type: Literal["healed"] = "healed"
    attempt: int
    failure: str
    tier: Literal[1, 2, 3]
    rule: str
    remedy: str
    detail: str


class Reflected(_Event):
    """A model thought about a failure once; `note` goes before the next attempt, `check` is what was executed."""

    type: Literal["reflected"] = "reflected"
    attempt: int
    note: str
    check: str


class FailureNoted(_Event):
    """A task failed for good, and this is what later ones should know."""

    type: Literal["failure_noted"] = "failure_noted"
    signature: str
    tried: tuple[str, ...]
    reflection: str
    root_cause: str
    guidance: str


class AfterwardsDone(_Event):
    """A job that follows a task is done, or has failed for this reason."""

    type: Literal["afterwards_done"] = "afterwards_done"
    job: str
    failure: str | None = None


Event: TypeAlias = (
    Prompted
    | Replied
    | Noted
    | HiveCreated
    | HiveConfigured
    | HiveDeleted
    | Failed
    | WorkspaceCreated
    | Checkpointed
    | RolledBack
    | PackagesInstalled
    | WorkspaceRepaired
    | WorkspaceForked
    | WorkspaceArchived
    | WorkspaceRestored
    | WorkspaceDestroyed
    | SessionChanged
    | SessionWarned
    | RoomReplaced
    | FallbackChosen
    | OutageBegan
    | OutageEnded
    | AccessDenied
    | AttachmentsReceived
    | ArtifactsCollected
    | TaskStarted
    | TaskForked
    | TaskEnded
    | CancelAsked
    | Classified
    | Planned
    | Gathered
    | ModelCalled
    | Proposed
    | Ruled
    | Observed
    | Asked
    | Answered
    | LoopWarned
    | Healed
    | Reflected
    | FailureNoted
    | AfterwardsDone
)

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
