"""Pictures of a conversation: shown to a model that reads images, and told to any other.

A conversation holds paths and no bytes. Which pictures a result has is in the `metadata` of its part; they are looked
at anew for each request, so that nothing of them has to be kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelRequest,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)

#: What every provider takes: of each request the newest pictures, none larger than this.
MOST_PICTURES = 4
MOST_BYTES = 3_500_000
TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")

_PICTURES = "pictures"
_BLIND = "this model reads no images"
_OLD = "newer ones have its place; read_file shows it again"


@dataclass(frozen=True, slots=True)
class Picture:
    media_type: str
    data: bytes


#: Returns for each path its picture, or in words why there is none to show.
Look: TypeAlias = Callable[[Sequence[str]], Awaitable[Mapping[str, Picture | str]]]


def mark(paths: Sequence[str]) -> dict[str, Any] | None:
    """Return what the metadata of a result says about its pictures."""
    return {_PICTURES: list(paths)} if paths else None


async def seen(messages: Sequence[ModelMessage], look: Look | None) -> list[ModelMessage]:
    """Put the pictures where they came from: as images if there is a way to look at them, else in words.

    One that came several times is shown where it came last.
    """
    newest: dict[str, int] = {}
    for place in reversed(range(len(messages))):
        for path in reversed(_paths(messages[place])):
            newest.setdefault(path, place)
    shown = dict(list(newest.items())[:MOST_PICTURES])
    found = await look(list(shown)) if look is not None and shown else None
    return [_with(message, place, shown, found) for place, message in enumerate(messages)]


def has_images(messages: Sequence[ModelMessage]) -> bool:
    """Say whether a conversation shows a picture."""
    prompts = (part.content for message in messages for part in message.parts if isinstance(part, UserPromptPart))
    return any(isinstance(one, BinaryContent) for content in prompts for one in content)


async def not_taken(paths: Sequence[str]) -> Mapping[str, Picture | str]:
    """Show nothing, to a provider that could not read it."""
    return dict.fromkeys(paths, "the provider did not take it")


def _paths(message: ModelMessage) -> list[str]:
    parts = [part for part in message.parts if isinstance(part, ToolReturnPart) and isinstance(part.metadata, dict)]
    return list(dict.fromkeys(path for part in parts for path in part.metadata.get(_PICTURES, ())))


def _with(
    message: ModelMessage, place: int, shown: Mapping[str, int], found: Mapping[str, Picture | str] | None
) -> ModelMessage:
    if not isinstance(message, ModelRequest) or not (paths := _paths(message)):
        return message
    content: list[UserContent] = []
    for path in paths:
        if found is None:
            content += _shown(path, _BLIND)
        else:
            content += _shown(path, found[path] if shown.get(path) == place else _OLD)
    after = max(at for at, part in enumerate(message.parts) if isinstance(part, ToolReturnPart)) + 1
    return replace(message, parts=[*message.parts[:after], UserPromptPart(content), *message.parts[after:]])


def _shown(path: str, picture: Picture | str) -> list[UserContent]:
    name = path.replace("<", "&lt;")  # the name of a file may not speak for Skep
    if isinstance(picture, str):
        return [f"The picture {name} is not shown: {picture}."]
    return [f"The picture {name}:", BinaryContent(picture.data, media_type=picture.media_type)]
