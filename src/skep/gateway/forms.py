"""What goes in and out as JSON. What is not known is refused."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from skep.tasks.task import Status, Step, Task

if TYPE_CHECKING:  # it brings the database along, which a client has no use for
    from skep.state.hives import Hive

DEFAULT_THREAD = "api:default"
MAX_WAIT_S = 300
MAX_LIST = 500


class _Asked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Prompt(_Asked):
    """What a hive is asked for."""

    prompt: str
    """The text, as a person wrote it."""
    thread: str = DEFAULT_THREAD
    """The conversation that it belongs to."""


class Thread(_Asked):
    """Which computer of a hive is meant."""

    thread: str = DEFAULT_THREAD
    """The conversation whose it is."""


class Reason(_Asked):
    """Why a task is ended."""

    why: Annotated[str, Field(max_length=1000)] = ""
    """In words, for the record."""


class Place(_Asked):
    """From where a task is run again."""

    step: Annotated[int, Field(ge=0)]
    """The last step that is taken over; 0 takes none."""


class Reply(_Asked):
    """What a person says to what a task asks."""

    answer: Annotated[str, Field(max_length=100_000)]
    """The text; for an approval, yes or no."""
    call: Annotated[str, Field(max_length=200)] | None = None
    """Which question, where there is more than one: the field `call` of the event `asked`."""


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TaskForm(_Told):
    """A task as it stands."""

    id: str
    hive: str
    thread: str
    status: Status
    prompt: str
    title: str
    reply: str | None
    """What the hive answered; null while there is no answer."""
    confidence: float | None
    partial: bool
    """Whether a limit ended the work before it was done, or some of the tasks of its plan did not succeed."""
    scripted: bool
    """Whether the answers came from a script and not from a model."""
    error: str | None
    """Why it failed or was cancelled."""
    usd: float
    """What its model calls cost, with those of the tasks of its plan, as far as that is known."""
    unpriced_calls: int
    """Model calls whose price is not known."""
    tokens: int
    attempt: int
    starts: int
    parent: str | None
    root: str
    after: list[str]
    origin: str | None
    """The task that it was forked from."""
    origin_step: int | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None

    @classmethod
    def of(cls, task: Task) -> TaskForm:
        return cls.model_validate(task.as_json())

    def task(self, account_id: str) -> Task:
        """Return the task that this form was made of, but for who works on it."""
        same = {name: getattr(self, name) for name in Task.__slots__ if name in type(self).model_fields}
        same |= {"account_id": account_id, "hive_id": self.hive, "unpriced": self.unpriced_calls}
        return Task(**same | {"after": tuple(self.after), "step": self.origin_step or 0})


class StepForm(_Told):
    """One step that a task took; its number is what fork takes."""

    number: int
    kind: str
    what: str
    status: Literal["done", "running", "interrupted"]
    at: datetime

    @classmethod
    def of(cls, step: Step) -> StepForm:
        return cls.model_validate(step.as_json())

    def step(self) -> Step:
        return Step(**dict(self))


class HiveForm(_Told):
    """A hive that can be asked."""

    id: str
    name: str
    created_at: datetime

    @classmethod
    def of(cls, hive: Hive) -> HiveForm:
        return cls(id=hive.id, name=hive.name, created_at=hive.created_at)


class ComputerForm(_Told):
    """The computer of a thread."""

    session: str
    """Id of its session."""
    down: str | None
    """Why it has no sandbox; null when it is up."""


class Refusal(_Told):
    """Why a request was refused, and what to do."""

    error: str
    """Name in docs/reference/errors.md."""
    message: str
    hint: str | None
