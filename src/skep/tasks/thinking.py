"""Asking a model as a durable step: an answer, or the way in which there was none, is on record once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from skep import errors
from skep.errors import Defect, SkepError
from skep.models.exchange import Answer, Request
from skep.models.failures import ModelFailure, failure_of
from skep.models.messages import dump_messages, load_messages
from skep.models.prices import Spend
from skep.state.events import ModelCalled
from skep.tasks.meter import Meter, used_up
from skep.tasks.run import Run

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_ai import ToolDefinition
    from pydantic_ai.messages import ModelMessage, ModelResponse

    from skep.healing.breaker import Breakers
    from skep.models.models import Models
    from skep.models.sight import Look
    from skep.models.spec import Level, Role


@dataclass(frozen=True, slots=True)
class Heard:
    """What a model said; `elapsed_s` is what the task had taken by then."""

    response: ModelResponse
    spend: Spend
    at: datetime
    elapsed_s: float
    value: dict[str, Any] | None

    @property
    def text(self) -> str:
        from skep.agent.conversation import spoken

        return spoken(self.response)


class Thinker:
    """The models, for one task. `level` and `avoid` are what healing has decided so far.

    A provider whose circuit is open is passed over; with `heals` that is a failure first, so that the switch to
    another one is decided by healing and on record.
    """

    def __init__(self, run: Run, models: Models, breakers: Breakers, meter: Meter, *, heals: bool = False) -> None:
        self._run = run
        self._models = models
        self._breakers = breakers
        self._meter = meter
        self._heals = heals
        self.level: Level | None = None
        self.avoid: frozenset[str] = frozenset()
        #: How often in a row there was no answer.
        self._tries = 0

    async def ask(
        self,
        role: Role,
        messages: Sequence[ModelMessage],
        *,
        tools: Sequence[ToolDefinition] = (),
        schema: type[BaseModel] | None = None,
        level: Level | None = None,
        look: Look | None = None,
    ) -> Heard:
        """Ask once. Raises the failure, on record like an answer, if there was none.

        `look` gives the pictures of the conversation to a model that reads images; what they show is not on record.
        """
        self._meter.check(last=role == "reply")
        wanted = level or self.level
        request = Request(role, messages, tools, schema, wanted, self.avoid, tries=self._tries, look=look)
        self._run.journal.write_soon()

        async def body() -> dict[str, Any]:
            if not self._run.forgotten("model"):
                return await self._ask_in_time(request)
            warned = replace(request, messages=[*request.messages, _warning()])
            return {**await self._ask_in_time(warned), "life": self._run.task.starts}

        told = await self._run.step(f"model {role}", body)
        self._run.begin_anew(told.get("life", 0))
        self._meter.go_on_from(told["elapsed_s"])
        self._note(role, told)
        if "limit" in told:
            raise used_up(told["limit"])
        if "response" not in told:
            self._tries += 1
            raise _read_failure(told)
        self._tries = 0
        return Heard(
            _read_response(told["response"]),
            _read_spend(told["spend"]),
            datetime.fromisoformat(told["at"]),
            told["elapsed_s"],
            told["value"],
        )

    async def _ask_in_time(self, request: Request) -> dict[str, Any]:
        """Ask, and say of what came of it how much time the task had taken by then; that is where it has an end."""
        told: dict[str, Any] = {"limit": "seconds", "requests": 0, "spend": None}
        if self._meter.left_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._meter.left_s):
                    told = await self._ask(request)
        return {**told, "at": datetime.now(UTC).isoformat(), "elapsed_s": round(self._meter.elapsed_s, 3)}

    async def _ask(self, request: Request) -> dict[str, Any]:
        try:
            if self._heals:
                self._look_at_circuit(request)
            answer = await self._models.ask(request)
        except ModelFailure as failure:
            for one in (*failure.earlier, failure):
                self._break(one)
            asked = [one for one in (*failure.earlier, failure) if one.kind != "circuit_open"]
            return {"failure": _failure(failure), "spend": _spend(failure.spend), "requests": len(asked)}
        except SkepError as error:
            return {"error": [type(error).__name__, error.message, error.hint], "spend": None, "requests": 0}
        for one in answer.failures:
            self._break(one)
        self._breakers.succeeded(f"provider:{answer.spend.provider}")
        return _answer(answer)

    def _look_at_circuit(self, request: Request) -> None:
        best = self._models.choose(request.role, level=request.level, avoid=request.avoid)[0]
        circuit = f"provider:{best.provider}"
        if self._breakers.is_open(circuit):
            failure = failure_of(best, "circuit_open", "it has failed too often lately to be asked now")
            failure.retry_after_s = round(self._breakers.rests_s(circuit), 1)
            raise failure

    def _break(self, failure: ModelFailure) -> None:
        if failure.kind != "circuit_open":
            self._breakers.failed(f"provider:{failure.provider}", failure.kind)

    def _note(self, role: Role, told: dict[str, Any]) -> None:
        spend = None if told["spend"] is None else _read_spend(told["spend"])
        self._meter.add(told["requests"], spend)
        if spend is None:
            return
        called = ModelCalled(
            role=role,
            provider=spend.provider,
            model=spend.model,
            input_tokens=spend.input_tokens,
            output_tokens=spend.output_tokens,
            usd=None if spend.usd is None else float(spend.usd),
            duration_ms=told.get("duration_ms", 0),
            passed_over=tuple(told.get("passed_over", ())),
        )
        self._run.note("model", called, numbered=True)


_FORGOTTEN = (
    "A worker died here, and what it did last is not known: acts that you do not see may have been carried out. "
    "Look before you do something that must not be done twice."
)


def _warning() -> ModelMessage:
    from pydantic_ai.messages import ModelRequest, UserPromptPart

    return ModelRequest(parts=[UserPromptPart(_FORGOTTEN)])


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "response": dump_messages([answer.response]),
        "spend": _spend(answer.spend),
        "duration_ms": answer.duration_ms,
        "requests": 1 + len(answer.failures),
        "passed_over": [f"{one.name}: {one.kind}" for one in answer.failures],
        "value": None if answer.value is None else answer.value.model_dump(mode="json"),
    }


def _read_response(told: str) -> ModelResponse:
    from pydantic_ai.messages import ModelResponse

    (response,) = load_messages(told)
    if not isinstance(response, ModelResponse):
        raise Defect("what is on record of a model is no answer")
    return response


def _spend(spend: Spend | None) -> dict[str, Any] | None:
    if spend is None:
        return None
    return {
        "provider": spend.provider,
        "model": spend.model,
        "input_tokens": spend.input_tokens,
        "output_tokens": spend.output_tokens,
        "usd": None if spend.usd is None else str(spend.usd),
    }


def _read_spend(told: dict[str, Any]) -> Spend:
    return Spend(**{**told, "usd": None if told["usd"] is None else Decimal(told["usd"])})


def _failure(failure: ModelFailure) -> dict[str, Any]:
    return {
        "message": failure.message,
        "kind": failure.kind,
        "provider": failure.provider,
        "model": failure.model,
        "status_code": failure.status_code,
        "retry_after_s": failure.retry_after_s,
        "hint": failure.hint,
    }


def _read_failure(told: dict[str, Any]) -> SkepError:
    if (failure := told.get("failure")) is not None:
        return ModelFailure(**failure)
    name, message, hint = told["error"]
    return read_error(name, message, hint)


def read_error(name: str, message: str, hint: str | None) -> SkepError:
    """Return an error that was on record as it was raised."""
    kind = getattr(errors, name, Defect)
    return kind(message, hint=hint) if issubclass(kind, SkepError) else Defect(message, hint=hint)
