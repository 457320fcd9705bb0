"""Supervise a worker: attempt after attempt, with what healing decides between them, until there is an outcome."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import assert_never

import structlog

from skep.agent.conversation import Conversation
from skep.agent.desk import Desk
from skep.agent.loop import Brief, Ending, Finished, Guard, Happening, Limits, Steps, Stopped, work
from skep.agent.observations import Trouble
from skep.agent.toolbox import Toolbox
from skep.errors import Defect, LeaseLost, SkepError
from skep.healing import reflection
from skep.healing.diagnosis import diagnose, healed
from skep.healing.evidence import check_of, latest_check
from skep.healing.failure import Check, Failure
from skep.healing.guard import LoopGuard
from skep.healing.history import History, Options
from skep.healing.naming import name, of_trouble
from skep.healing.note import write_note
from skep.healing.remedies import (
    Accept,
    BackOff,
    Compact,
    DoubleTimeout,
    Escalate,
    GiveUp,
    InstructStricter,
    OfferInstall,
    Reflect,
    Remedy,
    ResolveAgain,
    RetryNow,
    SwitchProvider,
    UseFallbackTool,
)
from skep.models.failures import ModelFailure
from skep.state.events import Event, LoopWarned, Observed, Proposed, Ruled
from skep.tasks.acting import ruled_key
from skep.tasks.meter import Meter
from skep.tasks.partial import partial_reply
from skep.tasks.run import Outcome, Run
from skep.tasks.thinking import Thinker

#: Trouble that ends an attempt, so that healing decides; a worker is left to deal with the rest by itself. A tool of
#: the hive's own that says no is worth a reflection, a file that is not there is not.
STOPS_ON = frozenset(
    (
        "tool_timeout",
        "sandbox_lost",
        "missing_package",
        "empty_result",
        "circuit_open",
        "use_skill:tool_refused",
        "use_skill:tool_error",
    )
)
#: Of what happened, the most that a reflection gets to see.
_KEPT_EVENTS = 200


@dataclass(frozen=True, slots=True)
class Means:
    """What a task is carried with. `options` is asked anew for each failure, with the seconds that are left."""

    thinker: Thinker
    steps: Steps
    toolbox: Toolbox
    desk: Desk
    meter: Meter
    limits: Limits
    confidence: float
    options: Callable[[float | None], Options]


class Supervisor:
    """Carries one task to its outcome."""

    def __init__(self, run: Run, talk: Conversation, means: Means) -> None:
        self._run = run
        self._talk = talk
        self._means = means
        self._history = History()
        self._happened: list[Event] = []
        self._reflection = ""

    async def carry(self) -> Outcome:
        """Attempt the task until it is done, or until nothing more can be done about its failures."""
        while True:
            ended = await self._attempt()
            failure = self._fault(ended)
            if failure is None:
                return self._done(ended)
            remedy = diagnose(failure, self._history, options=self._options())
            await self._record(failure, remedy)
            if isinstance(remedy, Accept):
                return self._done(ended)
            if isinstance(remedy, GiveUp):
                return await self._give_up(ended, failure, remedy)
            self._history = self._history.after(failure, remedy)
            await self._apply(failure, remedy)

    async def _attempt(self) -> Ending | Failure:
        brief = Brief(
            run=self._run.task.id,
            actor="worker",
            conversation=self._talk,
            toolbox=self._means.toolbox,
            stops_on=STOPS_ON if self._options().healing else frozenset(),
        )
        guard: Guard = LoopGuard()
        try:
            async with aclosing(work(brief, self._means.steps, self._means.limits, guard)) as happenings:
                return await self._consume(happenings)
        except LeaseLost:
            raise  # another worker has the task
        except SkepError as error:
            return name(error)

    async def _consume(self, happenings: AsyncGenerator[Happening | Ending, None]) -> Ending:
        async for one in happenings:
            if isinstance(one, Finished | Stopped):
                return one
            self._happened = [*self._happened[-_KEPT_EVENTS:], one]
            self._put_on_record(one)
        raise Defect("a worker ended without saying how")

    def _put_on_record(self, event: Happening) -> None:
        """Record what happened. An act waits itself until the ruling that lets it run is written."""
        run = self._run
        match event:
            case Proposed(call=call):
                run.note_ahead(f"proposed {call}", event)
            case Ruled(call=call, ruling=verdict):
                run.note_ahead(ruled_key(call, verdict), event)
            case Observed(call=call, observation=seen):
                run.note(f"observed {call}", event, numbered=call == run.acted)
                if seen.get("kind") not in ("trouble", "refused", "interrupted"):
                    self._history = self._history.progressed()
            case LoopWarned(step=step, pattern=pattern):
                run.note(f"warned {step} {pattern}", event)
            case _:
                assert_never(event)

    def _fault(self, ended: Ending | Failure) -> Failure | None:
        """Name what is wrong with how an attempt ended, if anything is."""
        match ended:
            case Failure():
                return ended
            case Finished(outcome="failed", reply=reply):
                return Failure("gave_up", reply, check=self._last_check())
            case Finished(confidence=sure) if sure < self._means.confidence:
                return Failure("low_confidence", f"the worker is {sure:.0%} sure of its answer")
            case Finished():
                return None
            case Stopped(evidence=Trouble() as seen):
                return of_trouble(
                    seen.failure,
                    seen.message,
                    seen.tool,
                    packages=seen.packages,
                    ecosystem=seen.ecosystem or "python",
                    fallback=seen.fallback,
                    check=check_of(seen.model_dump(mode="json")),
                )
            case Stopped(failure=kind, why=why):
                return of_trouble(kind, why, "")
            case _:
                assert_never(ended)

    def _options(self) -> Options:
        return self._means.options(max(0.0, self._means.meter.left_s))

    async def _record(self, failure: Failure, remedy: Remedy) -> None:
        if isinstance(remedy, GiveUp) and not remedy.noted:
            structlog.get_logger("skep.tasks").info("task_not_healed", task=self._run.task.id, failure=str(failure))
            return
        attempt = self._history.attempt
        event = healed(failure, remedy, attempt=attempt)
        self._happened.append(event)
        again = 0 if isinstance(remedy, Accept | GiveUp) else 1
        await self._run.record(_healed_key(attempt), event, attempt=attempt + again)

    async def _apply(self, failure: Failure, remedy: Remedy) -> None:
        """Do what was decided. What the next attempt has to know is said to it."""
        talk, desk, thinker = self._talk, self._means.desk, self._means.thinker
        talk.settle()
        match remedy:
            case BackOff(seconds=seconds):
                await self._run.rest(_healed_key(self._history.attempt - 1), seconds)
            case RetryNow() | Accept() | GiveUp():
                pass
            case InstructStricter(text=text):
                talk.say(text)
            case SwitchProvider(avoid=provider):
                thinker.avoid |= {provider}
            case Escalate(level=level):
                thinker.level = level
                talk.say(f"{failure.message}. Check it again with your own eyes, and finish with what you find.")
            case DoubleTimeout(tool=tool):
                talk.say(f"{tool} ran out of time. It has {desk.double(tool):g} s from now on: try it again.")
            case UseFallbackTool(tool=tool, instead=instead):
                talk.say(f"{tool} found nothing. Use {instead} instead.")
            case ResolveAgain():
                await desk.again()
                talk.say(
                    "The sandbox was lost, and is there again with its files. What ran in it is gone: do it again."
                )
            case Compact():
                talk.compact()
            case OfferInstall(packages=packages, ecosystem=ecosystem):
                talk.say(_offer(packages, ecosystem))
            case Reflect():
                await self._reflect(failure)
            case _:
                assert_never(remedy)

    async def _reflect(self, failure: Failure) -> None:
        check = failure.check or self._last_check()
        asked = reflection.question(self._run.task.prompt, failure, self._happened, check=check, history=self._history)
        try:
            said = (await self._means.thinker.ask("reflect", asked)).text
        except ModelFailure:
            said = ""  # then the decision table has the word
        self._reflection = reflection.bounded(said, failure)
        attempt = self._history.attempt - 1
        event = reflection.reflected(self._reflection, attempt=attempt, check=check)
        self._run.note(f"reflected {attempt}", event)
        self._talk.say(reflection.wrapped(self._reflection))

    def _last_check(self) -> Check | None:
        return latest_check(self._happened)

    def _done(self, ended: Ending | Failure) -> Outcome:
        if not isinstance(ended, Finished):
            raise Defect("an attempt that did not finish was taken for done")
        return Outcome("succeeded", "done", reply=ended.reply, confidence=ended.confidence)

    async def _give_up(self, ended: Ending | Failure, failure: Failure, remedy: GiveUp) -> Outcome:
        note = write_note(failure, self._history, reflection=self._reflection)
        before = (note.event(),) if remedy.noted else ()
        if failure.kind == "limit":
            reply = await partial_reply(self._talk, failure, self._means.thinker, self._happened)
            return Outcome("failed", failure.message, reply=reply, partial=True, before=before)
        reply = ended.reply if isinstance(ended, Finished) else note.reply(healing=self._options().healing)
        return Outcome("failed", str(failure)[:500], reply=reply, before=before)


def _offer(packages: Sequence[str], ecosystem: str) -> str:
    call = json.dumps({"ecosystem": ecosystem, "names": list(packages)})
    return (
        f"Not installed: {', '.join(packages)}. If you need it, and it is not a file of your own, call "
        f"install_packages with {call}. Else do without."
    )


def _healed_key(attempt: int) -> str:
    return f"healed {attempt}"
