"""Find the line and column of each field in a JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

FieldPath = tuple[str | int, ...]

_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r"[$A-Za-z_][\w$-]{0,59}", re.ASCII)
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Position:
    line: int
    column: int

    @classmethod
    def of(cls, text: str, offset: int) -> Position:
        """Count lines and columns from 1, as editors do."""
        return cls(text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset))


@dataclass(slots=True)
class Outline:
    """Where each field of a valid JSON text begins, and which were given twice."""

    offsets: dict[FieldPath, int] = field(default_factory=dict)
    repeated: list[tuple[FieldPath, int]] = field(default_factory=list)


def outline(text: str) -> Outline:
    """Walk a text that `json.loads` has accepted; a field's place is its name, an item's its value."""
    found = Outline()
    _walk(text, _BLANK.match(text, 0).end(), (), found)  # type: ignore[union-attr]
    return found


def nearest(offsets: Mapping[FieldPath, int], path: FieldPath) -> int | None:
    """Return the place of a field or, when it is absent, of the closest thing around it."""
    for length in range(len(path), 0, -1):
        if path[:length] in offsets:
            return offsets[path[:length]]
    return None


def spell(path: FieldPath) -> str:
    """Write a path as a person would: chat_models[0].id. A strange name is quoted, escaped and cut short."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{_safe(part)}" for part in path)
    return text.removeprefix(".")


def _safe(name: str) -> str:
    if _PLAIN.fullmatch(name):
        return name
    quoted = json.dumps(name)
    return quoted if len(quoted) <= 60 else f'{quoted[:57]}…"'


def _walk(text: str, at: int, path: FieldPath, found: Outline) -> int:
    match text[at]:
        case "{":
            return _walk_object(text, at + 1, path, found)
        case "[":
            return _walk_array(text, at + 1, path, found)
        case _:
            return _DECODER.raw_decode(text, at)[1]


def _walk_object(text: str, at: int, path: FieldPath, found: Outline) -> int:
    while True:
        at = _skip(text, at, ",")
        if text[at] == "}":
            return at + 1
        name, after = _DECODER.raw_decode(text, at)
        here = (*path, name)
        if here in found.offsets:
            found.repeated.append((here, at))
        found.offsets[here] = at
        at = _walk(text, _skip(text, after, ":"), here, found)


def _walk_array(text: str, at: int, path: FieldPath, found: Outline) -> int:
    index = 0
    while True:
        at = _skip(text, at, ",")
        if text[at] == "]":
            return at + 1
        found.offsets[*path, index] = at
        at = _walk(text, at, (*path, index), found)
        index += 1


def _skip(text: str, at: int, mark: str) -> int:
    at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
    if text[at] == mark:
        at = _BLANK.match(text, at + 1).end()  # type: ignore[union-attr]
    return at
