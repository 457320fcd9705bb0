"""The loop of a worker: propose, rule, act, observe, until it finishes or something stops it.

It yields what happens, and whoever consumes it puts each event on record before asking for the next: so nothing runs
before its ruling is on record. The last thing that it yields is a `Finished` or a `Stopped`. All that takes time or can
differ from one run to the next is behind `Steps`, so that a run that is repeated from its recorded steps is the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Protocol, TypeAlias

from skep.agent.actions import Action, Finish, Stamp
from skep.agent.bounds import clip, printable
from skep.agent.conversation import Conversation, Tally, Thought, spoken
from skep.agent.observations import CommandPolled, Observation, Refused, Trouble
from skep.governance.ruling import Ruling
from skep.state.events import LoopWarned, Observed, Proposed, Ruled

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelMessage, ToolCallPart

    from skep.agent.toolbox import Toolbox

NUDGE = "Nothing was done. Use a tool, or end the task with the tool finish: what is only said reaches nobody."
_SAID_CHARS = 4_000
_EXCERPT_CHARS = 400

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


async def work(brief: Brief, steps: Steps, limits: Limits, guard: Guard) -> AsyncGenerator[Happening | Ending, None]:
    """Carry the conversation on until it ends. A failure of the model itself is raised, and can be followed by more."""
    talk = brief.conversation
    talk.settle()
    talk.unread = 0
    while (which := limits.reached(talk.tally)) is None:
        talk.step += 1
        thought = await steps.think(talk.messages, talk.step)
        async with aclosing(_turn(brief, steps, limits, guard, thought)) as happenings:
            async for happening in happenings:
                if isinstance(happening, Finished | Stopped):
                    talk.settle()
                    yield happening
                    return
                yield happening
    yield _spent(which)


async def _turn(
    brief: Brief, steps: Steps, limits: Limits, guard: Guard, thought: Thought
) -> AsyncGenerator[Happening | Ending, None]:
    """Do what one answer of the model asks for, one call after the other."""
    talk, said = brief.conversation, spoken(thought.response)
    calls = talk.hear(thought)
    advice = [] if calls else [guard.spoke()]
    for number, part in enumerate(calls, start=1):
        if talk.tally.acts >= limits.steps:
            yield _spent("steps")
            return
        stamp = Stamp(run=brief.run, step=talk.step, call=f"{talk.step}-{number}", at=thought.at, actor=brief.actor)
        proposal = brief.toolbox.parse(part, stamp)
        yield _proposed(stamp, part, proposal, said if number == 1 else "")
        if isinstance(proposal, Finish):
            yield Finished(proposal.reply, proposal.confidence, proposal.outcome)
            return
        async with aclosing(_carry_out(talk, part, proposal, steps)) as happenings:
            async for happening in happenings:
                if not isinstance(happening, _Done):
                    yield happening
                    continue
                if (stop := _stop(brief, happening)) is not None:
                    yield stop
                    return
                advice.append(_noticed(guard, happening))
    talk.settle()
    if not calls:
        talk.say(NUDGE)
    for one in filter(None, advice):
        yield LoopWarned(run=brief.run, step=talk.step, pattern=one.pattern, guidance=one.guidance)
        if one.stop:
            yield Stopped("loop", f"it went round in circles: {one.guidance}", which=one.pattern)
            return
        talk.say(one.guidance)


@dataclass(frozen=True, slots=True)
class _Done:
    proposal: Action | Trouble
    observation: Observation


async def _carry_out(
    talk: Conversation, part: ToolCallPart, proposal: Action | Trouble, steps: Steps
) -> AsyncGenerator[Ruled | Observed | _Done, None]:
    stamp = proposal.stamp
    if isinstance(proposal, Trouble):
        part, talk.unread = talk.forget_arguments(part), talk.unread + 1
        observation: Observation = proposal
    else:
        talk.unread = 0
        call = Call(stamp.call, stamp.step, proposal)
        ruling = await steps.rule(call)
        yield _ruled(stamp, ruling)
        if ruling.verdict == "ask":
            ruling = await steps.approve(call, ruling.why)
            yield _ruled(stamp, ruling)
        if ruling.verdict == "allow":
            talk.tally.acts += 1
            observation = await steps.act(call)
        else:
            observation = Refused(stamp=stamp, why=ruling.why)
    talk.answer(part, observation)
    told = observation.model_dump(mode="json")
    yield Observed(run=stamp.run, step=stamp.step, call=stamp.call, observation=told)
    yield _Done(proposal, observation)


def _stop(brief: Brief, done: _Done) -> Stopped | None:
    """Say whether an attempt ends here, rather than the model being left to deal with it."""
    call = None
    if not isinstance(done.proposal, Trouble):
        call = Call(done.proposal.stamp.call, done.proposal.stamp.step, done.proposal)
    match done.observation:
        case Refused(why=why) if "denied" in brief.stops_on:
            return Stopped("denied", why, call=call, evidence=done.observation)
        case Trouble() as trouble:
            too_often = brief.conversation.unread >= brief.malformed
            named = {trouble.failure, f"{trouble.tool}:{trouble.failure}"}
            if named & brief.stops_on or too_often:
                return Stopped(trouble.failure, trouble.message, call=call, evidence=trouble)
    return None


def _noticed(guard: Guard, done: _Done) -> Advice | None:
    seen = done.observation
    asked = done.proposal.message if isinstance(done.proposal, Trouble) else _equal(done.proposal)
    failed = isinstance(seen, Refused | Trouble) or getattr(seen, "exit_code", 0) not in (0, None)
    waiting = isinstance(seen, CommandPolled) and seen.running
    return guard.acted(asked, _equal(seen), failed=failed, waiting=waiting)


def _equal(told: Action | Observation) -> str:
    """Return a text that is the same for the same act or result, whenever it was."""
    return told.model_dump_json(exclude={"stamp", "spooled_to", "pictures", "picture"})


def _proposed(stamp: Stamp, part: ToolCallPart, proposal: Action | Trouble, said: str) -> Proposed:
    if isinstance(proposal, Trouble):
        excerpt = clip(str(part.args or ""), _EXCERPT_CHARS)
        action = {"kind": "unreadable", "tool": part.tool_name, "arguments": printable(excerpt)}
    else:
        action = proposal.model_dump(mode="json")
    said = printable(clip(said, _SAID_CHARS))
    return Proposed(run=stamp.run, step=stamp.step, call=stamp.call, action=action, text=said)


def _ruled(stamp: Stamp, ruling: Ruling) -> Ruled:
    return Ruled(run=stamp.run, step=stamp.step, call=stamp.call, ruling=ruling.verdict, why=ruling.why)


def _spent(which: str) -> Stopped:
    return Stopped("limit", f"the task has used up its {which}", which=which)
