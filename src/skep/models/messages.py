"""Conversations as JSON, for what has to outlive a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelMessage


def dump_messages(messages: Sequence[ModelMessage]) -> str:
    from pydantic_ai.messages import ModelMessagesTypeAdapter

    return ModelMessagesTypeAdapter.dump_json(list(messages)).decode()


def load_messages(text: str | bytes) -> list[ModelMessage]:
    """Read what `dump_messages` wrote; a ValueError if it is anything else."""
    from pydantic_ai.messages import ModelMessagesTypeAdapter

    return ModelMessagesTypeAdapter.validate_json(text)
