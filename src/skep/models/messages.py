"""Conversations as JSON, for what has to outlive a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelMessage, ModelResponse, ModelResponsePart

#: What is shorter is no secret, and may be a part of any word.
_SHORTEST_KEY = 8


def dump_messages(messages: Sequence[ModelMessage]) -> str:
    from pydantic_ai.messages import ModelMessagesTypeAdapter

    return ModelMessagesTypeAdapter.dump_json(list(messages)).decode()


def load_messages(text: str | bytes) -> list[ModelMessage]:
    """Read what `dump_messages` wrote; a ValueError if it is anything else."""
    from pydantic_ai.messages import ModelMessagesTypeAdapter

    return ModelMessagesTypeAdapter.validate_json(text)


def without_key(response: ModelResponse, key: str | None) -> ModelResponse:
    """Take a key out of an answer: a server that repeats it must not bring it on record."""
    if key is None or len(key) < _SHORTEST_KEY:
        return response
    return replace(response, parts=[_masked(part, key) for part in response.parts])


def _masked(part: ModelResponsePart, key: str) -> ModelResponsePart:
    from pydantic_ai.messages import TextPart, ThinkingPart, ToolCallPart

    match part:
        case TextPart(content=text) | ThinkingPart(content=text) if key in text:
            return replace(part, content=text.replace(key, "[secret]"))
        case ToolCallPart() if key in (text := part.args_as_json_str()):
            changed: Any = part  # whose type leaves open which kind of tool it is for
            return cast("ModelResponsePart", replace(changed, args=text.replace(key, "[secret]")))
        case _:
            return part
