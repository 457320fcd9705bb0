"""All configured models: who answers what, with the next one in reserve."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from skep.errors import ModelMissing
from skep.models.exchange import Answer, Request
from skep.models.failures import ModelFailure, failure_of
from skep.models.messages import without_key
from skep.models.prices import spend_of
from skep.models.providers import Providers
from skep.models.spec import ROLE_LEVELS, Level, ModelSpec, Role, by_nearness

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelResponse


#: What a provider answers that cannot read a request, such as one with a broken picture.
_UNREADABLE = (400, 413, 415, 422)


def never(_: str) -> bool:
    """Take every provider for healthy."""
    return False


class Models:
    """The models of a program. Close it, or use it as a context, when the last answer is in."""

    def __init__(
        self, specs: Sequence[ModelSpec], *, timeout_s: float = 120, is_open: Callable[[str], bool] = never
    ) -> None:
        """`is_open` says right before a call that the provider's circuit is open, so that it is not asked for now."""
        self.specs = tuple(specs)
        self._timeout_s = timeout_s
        self.is_open = is_open
        self._providers = Providers(timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of all connections."""
        await self._providers.close()

    def choose(self, role: Role, *, level: Level | None = None, avoid: Collection[str] = ()) -> tuple[ModelSpec, ...]:
        """Order the models for a role, best first: the level asked for, then the stronger, then the weaker ones.

        Those to avoid are left out, unless there are no others.
        """
        order = by_nearness(level or ROLE_LEVELS[role])
        usable = [spec for spec in self.specs if not spec.lacks]
        if not usable:
            raise self._missing(role)
        ranked = sorted(usable, key=lambda spec: order.index(spec.level))
        wanted = [spec for spec in ranked if spec.provider not in avoid and spec.name not in avoid]
        return tuple(wanted or ranked)

    def _missing(self, role: Role) -> ModelMissing:
        if not self.specs:
            hint = 'add one to chat_models in config.json, such as {"provider": "rehearsal", "id": "hello"}'
            return ModelMissing(f"no model is configured that could {role}", hint=hint)
        lacking = self.specs[0]
        return ModelMissing(
            f"no model can {role}: {lacking.name} needs its key, and {lacking.lacks} is not set",
            hint=f"export {lacking.lacks}=…",
        )

    async def ask(self, request: Request) -> Answer:
        """Get one answer, from the next best model where one is overloaded; any other failure is the caller's."""
        specs = self.choose(request.role, level=request.level, avoid=request.avoid)
        failures: list[ModelFailure] = []
        for spec in specs:
            # Asked right before the call: of a circuit that is half open, only one call may go through.
            if self.is_open(spec.provider):
                continue
            try:
                answer = await self._ask(spec, request)
            except ModelFailure as failure:
                failure.earlier = tuple(failures)
                failures.append(failure)
                if failure.kind != "overloaded":
                    raise
            else:
                met = (*failures, *answer.failures)
                return replace(answer, tried=(*(each.name for each in met), spec.name), failures=met)
        if not failures:
            raise failure_of(specs[0], "circuit_open", "it has failed too often lately to be asked now")
        raise failures[-1]

    async def _ask(self, spec: ModelSpec, request: Request) -> Answer:
        from skep.models.hearing import judge
        from skep.models.output import NotTheSchema, read_value

        began = time.monotonic()
        response, met = await self._hear(spec, request)
        response = without_key(response, spec.key)
        spend = spend_of(spec, response.usage)
        judge(spec, response, spend)
        try:
            value = None if request.schema is None else read_value(response, request.schema)
        except NotTheSchema as error:
            raise failure_of(spec, "invalid_output", str(error), spend=spend) from error
        took_ms = round((time.monotonic() - began) * 1000)
        return Answer(response, spend, took_ms, spec.is_scripted, (spec.name,), value, met)

    async def _hear(self, spec: ModelSpec, request: Request) -> tuple[ModelResponse, tuple[ModelFailure, ...]]:
        """Hear a model out; one that refuses a request with pictures is asked once more without, and that is told."""
        from skep.models.hearing import hear
        from skep.models.output import parameters
        from skep.models.sight import has_images, not_taken, seen

        ask = partial(
            hear,
            spec,
            await self._providers.model(spec, request),
            parameters=parameters(request, spec),
            timeout_s=self._timeout_s,
            max_tokens=request.max_tokens,
        )
        messages = await seen(request.messages, request.look if spec.vision else None)
        try:
            return await ask(messages), ()
        except ModelFailure as failure:
            if failure.kind != "refused" or failure.status_code not in _UNREADABLE or not has_images(messages):
                raise
            return await ask(await seen(request.messages, not_taken)), (failure,)
