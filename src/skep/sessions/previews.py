"""What of an artifact is shown at once: the first lines, the head of a table, a small picture.

Made from the first bytes alone. What they hold is the agent's: control characters go, lines and cells are cut.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from skep.sessions.sniff import table_of, text_of

_LINES = 20
_LINE = 200
_ROWS = 10
_COLUMNS = 20
_CELL = 80
#: What colours a terminal's text, and the like.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_TABLES = ("text/csv", "text/tab-separated-values")
_TEXTS = ("application/json", "application/xml", "image/svg+xml")


@dataclass(frozen=True, slots=True)
class TextPreview:
    """The first lines of a text; `more` says that there are others, or that one was cut."""

    lines: tuple[str, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class TablePreview:
    """The first rows of a table, the first of them being its header."""

    rows: tuple[tuple[str, ...], ...]
    more: bool


@dataclass(frozen=True, slots=True)
class ImagePreview:
    """A small PNG of an image, on the shelf under this hash."""

    sha256: str
    width: int
    height: int


Preview = TextPreview | TablePreview | ImagePreview


def preview(media_type: str, head: bytes, *, whole: bool) -> TextPreview | TablePreview | None:
    """Return what can be shown of a file that begins so; `whole` says that this is all of it."""
    if not media_type.startswith("text/") and media_type not in _TEXTS:
        return None
    text = text_of(head)
    if text is None:
        return None
    if media_type in _TABLES and (table := table_of(text, whole=whole)):
        return _table(table[1], more=not whole)
    return _text(text, more=not whole)


def _text(text: str, *, more: bool) -> TextPreview:
    lines = text.splitlines()
    kept = tuple(_clean(line, _LINE) for line in lines[:_LINES])
    return TextPreview(kept, more or len(lines) > _LINES or any(len(line) > _LINE for line in lines[:_LINES]))


def _table(rows: list[list[str]], *, more: bool) -> TablePreview:
    cut = len(rows) > _ROWS or len(rows[0]) > _COLUMNS
    kept = tuple(tuple(_clean(cell, _CELL) for cell in row[:_COLUMNS]) for row in rows[:_ROWS])
    return TablePreview(kept, more or cut)


def _clean(text: str, most: int) -> str:
    """Take out what does not print or reorders what does, and shorten the rest."""
    plain = "".join(character if _prints(character) else "" for character in _SEQUENCE.sub("", text.expandtabs(4)))
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def _prints(character: str) -> bool:
    return character in "\u200c\u200d" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
