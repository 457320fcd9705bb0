"""The loop of a worker: propose, rule, act, observe, until it finishes or something stops it.

It yields what happens, and whoever consumes it puts each event on record before asking for the next: so nothing runs
before its ruling is on record. The last thing that it yields is a `Finished` or a `Stopped`. All that takes time or can
differ from one run to the next is behind `Steps`, so that a run that is repeated from its recorded steps is the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skep.agent.actions import Action, Finish, Stamp
from skep.agent.bounds import clip, printable
from skep.agent.conversation import Conversation, Thought, spoken
from skep.agent.observations import CommandPolled, Observation, Refused, Trouble
from skep.agent.terms import Advice, Brief, Call, Ending, Finished, Guard, Happening, Limits, Steps, Stopped
from skep.governance.ruling import Ruling
from skep.state.events import LoopWarned, Observed, Proposed, Ruled

if TYPE_CHECKING:
    from pydantic_ai.messages import ToolCallPart

__all__ = ["Advice", "Brief", "Call", "Ending", "Finished", "Guard", "Happening", "Limits", "Steps", "Stopped", "work"]

NUDGE = "Nothing was done. Use a tool, or end the task with the tool finish: what is only said reaches nobody."
_SAID_CHARS = 4_000
_EXCERPT_CHARS = 400


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
        stamp = Stamp(run=brief.run, step=talk.step, call=f"{talk.step}-{number}", at=thought.at, actor=brief.actor)
        proposal = brief.toolbox.parse(part, stamp)
        if talk.tally.acts >= limits.steps and not isinstance(proposal, Finish):
            yield _spent("steps")
            return
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
