"""Hear one model out: in pieces, within bounds, to a proper end."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_ai.direct import model_request_stream
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    ModelResponseStreamEvent,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
    ToolCallPartDelta,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.settings import ModelSettings

from skep.errors import SkepError
from skep.models.failures import failure_of, translate
from skep.models.prices import Spend
from skep.models.spec import ModelSpec
from skep.models.transport import no_answer_left_open

#: The most text of one answer, thoughts and arguments of calls included.
MOST_CHARACTERS = 1_000_000


async def hear(
    spec: ModelSpec,
    model: Model,
    messages: Sequence[ModelMessage],
    *,
    parameters: ModelRequestParameters,
    timeout_s: float,
    max_tokens: int | None,
) -> ModelResponse:
    """Ask once, without any retry, and return the whole answer; every failure is a ModelFailure."""
    settings = ModelSettings(max_retries=0, timeout=timeout_s, request_timeout=timeout_s)
    if max_tokens is not None:
        settings["max_tokens"] = max_tokens
    try:
        async with no_answer_left_open():
            return await _collect(spec, model, messages, parameters, settings)
    except SkepError:
        raise
    # Some forty adapters of other people raise whatever they like when a server sends nonsense; each of those errors
    # is this model's failure, and none of them may end a task without a name.
    except Exception as error:
        raise translate(error, spec) from error


async def _collect(
    spec: ModelSpec,
    model: Model,
    messages: Sequence[ModelMessage],
    parameters: ModelRequestParameters,
    settings: ModelSettings,
) -> ModelResponse:
    size = 0
    async with model_request_stream(
        model, messages, model_settings=settings, model_request_parameters=parameters, instrument=False
    ) as stream:
        async for event in stream:
            size += _size(event)
            if size > MOST_CHARACTERS:
                raise failure_of(spec, "too_long", f"the answer has more than {MOST_CHARACTERS:,} characters")
        return stream.get()


def _size(event: ModelResponseStreamEvent) -> int:
    match event:
        case PartStartEvent(part=TextPart(content=text) | ThinkingPart(content=text)):
            return len(text)
        case PartStartEvent(part=ToolCallPart(args=text)):
            return len(str(text or ""))
        case PartDeltaEvent(delta=TextPartDelta(content_delta=piece) | ThinkingPartDelta(content_delta=piece)):
            return len(piece or "")
        case PartDeltaEvent(delta=ToolCallPartDelta(args_delta=piece)):
            return len(str(piece or ""))
        case _:
            return 0


def judge(spec: ModelSpec, response: ModelResponse, spend: Spend) -> None:
    """Refuse an answer that its provider withheld, that has no end, or that says nothing."""
    if response.finish_reason == "content_filter":
        raise failure_of(spec, "refused", "the provider's filter withheld the answer", spend=spend)
    if not response.text and not response.tool_calls:
        raise failure_of(spec, "malformed", "the answer is empty", spend=spend)
    if _breaks_off(response):
        raise failure_of(spec, "cut", "the answer breaks off without an end", spend=spend)


def _breaks_off(response: ModelResponse) -> bool:
    if response.state not in {"complete", "suspended"}:
        return True
    if "finish_reason" in (response.provider_details or {}) or response.finish_reason not in {
        None,
        "stop",
        "tool_call",
    }:
        return False
    # Anthropic and Google always say why an answer ends. Some of those who speak OpenAI's protocol never do, so there
    # the count of tokens, which comes last, has to be missing as well.
    is_measured = not response.usage.unmeasured_requests
    return response.provider_name in {"anthropic", "google"} or (response.provider_name == "openai" and not is_measured)
