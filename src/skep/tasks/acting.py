"""The steps of a worker's loop, made durable: think, rule, approve, act."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from skep.agent.actions import Action, AskUser
from skep.agent.conversation import Thought
from skep.agent.desk import Desk
from skep.agent.loop import Call
from skep.agent.observations import Interrupted, Observation, Trouble, read_observation
from skep.agent.pictures import look
from skep.agent.toolbox import Toolbox
from skep.errors import LeaseLost, SkepError
from skep.governance.ruling import Policy, Ruling, rule
from skep.healing.breaker import Breakers
from skep.healing.failure import KINDS
from skep.state.events import Ruled
from skep.tasks.journal import event_of
from skep.tasks.meter import Meter
from skep.tasks.question import NO, YES, Questions
from skep.tasks.run import Run
from skep.tasks.thinking import Thinker, read_error

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelMessage

_CUT_OFF = (
    "The worker died while this ran: it may have taken effect, wholly or in part, or not at all. It was not run again. "
    "Find out what came of it before you decide."
)

_OUT_OF_TIME = "The time of the task was up, and so this was ended: it may have taken effect, wholly or in part."


def ruled_key(call: str, verdict: str) -> str:
    return f"ruled {call} {verdict}"


class DurableSteps:
    """What the loop asks for, each done once. An act that was cut off is told, not repeated."""

    def __init__(
        self,
        run: Run,
        thinker: Thinker,
        toolbox: Toolbox,
        desk: Desk,
        *,
        questions: Questions,
        meter: Meter,
        breakers: Breakers,
        policy: Policy,
    ) -> None:
        self._run = run
        self._thinker = thinker
        self._toolbox = toolbox
        self._desk = desk
        self._questions = questions
        self._meter = meter
        self._breakers = breakers
        self._policy = policy
        desk.ask = self._ask

    async def think(self, messages: Sequence[ModelMessage], step: int) -> Thought:
        look_around = partial(look, self._desk)
        heard = await self._thinker.ask("work", messages, tools=self._toolbox.definitions, look=look_around)
        tokens = heard.spend.input_tokens + heard.spend.output_tokens
        return Thought(heard.response, tokens, heard.spend.usd, heard.at, heard.elapsed_s)

    async def rule(self, call: Call) -> Ruling:
        """Rule on an act, as before if it was ruled on before."""
        for verdict in ("ask", "allow", "deny"):
            if (key := ruled_key(call.id, verdict)) in self._run.journal:
                recorded = event_of(await self._run.journal.read(key), Ruled)
                return Ruling(recorded.ruling, recorded.why)
        return rule(self._toolbox.asked(call.action), self._policy)

    async def approve(self, call: Call, why: str) -> Ruling:
        question = f"May it do this? {self._toolbox.asked(call.action).summary} ({why})"

        async def body() -> list[str]:
            answer = await self._questions.put(call.id, question, kind="approval", choices=(YES, NO))
            if answer is None:
                return ["deny", "nobody answered in time"]
            return ["allow", "a person allowed it"] if answer == YES else ["deny", "a person denied it"]

        verdict, reason = await self._run.step("approve", body)
        return Ruling(verdict, reason)

    async def act(self, call: Call) -> Observation:
        async def body() -> dict[str, Any]:
            try:
                seen = await self._perform_in_time(call)
                stamp = seen.stamp.model_copy(update={"at": self._run.now()})
                return {**seen.model_dump(mode="json"), "stamp": stamp.model_dump(mode="json")}
            except SkepError as error:
                return {"error": [type(error).__name__, error.message, error.hint]}

        self._run.journal.write_now()
        self._run.acted = call.id
        told = await self._run.step(f"act {call.action.kind}", body)
        if "error" in told and "kind" not in told:
            raise read_error(*told["error"])
        return read_observation(told)

    async def _perform_in_time(self, call: Call) -> Observation:
        """Perform an act, and end it when the time of the task is up; a person takes none of it."""
        stamp = self._stamped(call.action).stamp
        if self._meter.left_s <= 0:
            return Interrupted(stamp=stamp, note="The time of the task is up: it was not run.")
        try:
            async with asyncio.timeout(None if isinstance(call.action, AskUser) else self._meter.left_s) as scope:
                return await self._perform(call)
        except TimeoutError:
            if not scope.expired():
                raise
            return Interrupted(stamp=stamp, note=_OUT_OF_TIME)

    async def _perform(self, call: Call) -> Observation:
        # The ruling is written while the engine looks whether the act was done before; here it has to be on record.
        await self._run.journal.flush()
        action, circuit = self._stamped(call.action), self._circuit(call.action)
        if self._was_begun(call) and not self._toolbox.repeatable(action, self._desk):
            return Interrupted(stamp=action.stamp, note=_CUT_OFF)
        if not self._breakers.begin(circuit):
            message = f"{action.kind} has failed too often lately, and is left alone for a while"
            return Trouble(stamp=action.stamp, failure="circuit_open", tool=action.kind, message=message)
        try:
            seen = await self._toolbox.perform(action, self._desk)
        except LeaseLost as error:  # on the session: its computer has gone to another process
            seen = Trouble(stamp=action.stamp, failure="sandbox_lost", tool=action.kind, message=error.message)
        if isinstance(seen, Trouble) and seen.failure in KINDS:
            self._breakers.failed(circuit, seen.failure)
        else:
            self._breakers.succeeded(circuit)
        return seen

    def _circuit(self, action: Action) -> str:
        """Name the circuit of a tool: one for each hive, since what breaks it in one tells nothing about another."""
        return f"tool:{self._run.hive.id}:{action.kind}"

    def _stamped(self, action: Action) -> Action:
        """Give an act the key of this life of its task, which is not that of another act before."""
        if action.stamp.run == self._run.id:
            return action
        return action.model_copy(update={"stamp": action.stamp.model_copy(update={"run": self._run.id})})

    def _was_begun(self, call: Call) -> bool:
        """Say whether a worker before this one may have begun the act: its leave was on record when this one came."""
        return self._run.journal.found(ruled_key(call.id, "allow"))

    async def _ask(self, action: AskUser) -> str | None:
        return await self._questions.put(action.stamp.call, action.question, kind="question", choices=action.choices)
