"""The terms a worker works on: what it is to do, what it may use, who rules and acts for it, and how it can end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Protocol, TypeAlias

from skep.agent.actions import Action
from skep.agent.conversation import Conversation, Tally, Thought
from skep.agent.observations import Observation
from skep.governance.ruling import Ruling
from skep.state.events import LoopWarned, Observed, Proposed, Ruled

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelMessage

    from skep.agent.toolbox import Toolbox

Happening: TypeAlias = Proposed | Ruled | Observed | LoopWarned


@dataclass(frozen=True, slots=True)
class Call:
    """One act that is to be done. `id` is unique in the task, and the same whenever the task is repeated."""

    id: str
    step: int
    action: Action

    @property
    def key(self) -> str:
        """What makes a second run of it recognisable to whatever it acts on."""
        return self.action.stamp.key


class Steps(Protocol):
    """What the loop asks of whoever runs it; each of these is one durable step."""

    async def think(self, messages: Sequence[ModelMessage], step: int) -> Thought: ...

    async def rule(self, call: Call) -> Ruling: ...

    async def approve(self, call: Call, why: str) -> Ruling:
        """Ask the person about an act, wait for the answer, and return the final ruling: allow or deny."""
        ...

    async def act(self, call: Call) -> Observation: ...


class Advice(Protocol):
    """What a guard has noticed; with `stop` it has been said before."""

    @property
    def pattern(self) -> str: ...

    @property
    def guidance(self) -> str: ...

    @property
    def stop(self) -> bool: ...


class Guard(Protocol):
    """Notices a worker that goes round in circles."""

    def acted(self, call: str, result: str, *, failed: bool, waiting: bool) -> Advice | None:
        """Take note of an act and what came of it, as texts that are equal for equal acts and results.

        `waiting`: it asks whether something is done by now, so that asking again is right.
        """
        ...

    def spoke(self) -> Advice | None:
        """Take note of an answer without an act."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What one task may use; None is no limit. What cannot be priced, or is free, does not count as money."""

    steps: int = 50
    requests: int = 100
    tokens: int = 2_000_000
    usd: float | None = 2.0
    seconds: float = 3_600

    def reached(self, tally: Tally) -> str | None:
        """Return the name of the first limit that has been reached."""
        used: dict[str, tuple[float | Decimal, float | None]] = {
            "steps": (tally.acts, self.steps),
            "requests": (tally.requests, self.requests),
            "tokens": (tally.tokens, self.tokens),
            "usd": (tally.usd, self.usd),
            "seconds": (tally.elapsed_s, self.seconds),
        }
        return next((name for name, (spent, most) in used.items() if most is not None and 0 < spent >= most), None)


@dataclass(frozen=True, slots=True)
class Brief:
    """What a worker is to do, and the kinds of trouble (or `denied`) that end an attempt instead of being told to it.

    A kind may be bound to a tool, as in use_skill:tool_error.

    After `malformed` answers in a row with a call that cannot be read the attempt ends as well.
    """

    run: str
    actor: str
    conversation: Conversation
    toolbox: Toolbox
    stops_on: frozenset[str] = frozenset()
    malformed: int = 3


@dataclass(frozen=True, slots=True)
class Finished:
    reply: str
    confidence: float
    outcome: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The attempt ended before the work was done. `failure` is a kind of trouble, limit, loop or denied.

    `which` is the limit or the pattern of the loop, `call` and `evidence` the act that it ended with.
    """

    failure: str
    why: str
    which: str = ""
    call: Call | None = None
    evidence: Observation | None = None


Ending: TypeAlias = Finished | Stopped
