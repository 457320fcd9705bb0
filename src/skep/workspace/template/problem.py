"""One thing that is wrong in a template, with its place."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

FieldPath = tuple[str | int, ...]

_PLAIN = re.compile(r"[A-Za-z_][\w-]{0,59}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to put right. `field` is empty when the file as a whole is wrong; lines and columns count from 1."""

    line: int
    column: int
    field: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        field = f"{self.field}: " if self.field else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.line}:{self.column}: {field}{self.message}{hint}"


def spell(path: FieldPath) -> str:
    """Write a path as a person would: python.dependencies[2]. A strange name is quoted, escaped and cut short."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{_safe(part)}" for part in path)
    return text.removeprefix(".")


def _safe(name: str) -> str:
    if _PLAIN.fullmatch(name):
        return name
    quoted = json.dumps(name)
    return quoted if len(quoted) <= 60 else f'{quoted[:57]}…"'
