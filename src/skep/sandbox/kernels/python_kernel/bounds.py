"""How much of a value is shown. What is cut is said in a note."""

from __future__ import annotations

import json
import math
from typing import Any

TEXT_BYTES = 256 << 10
FORMAT_BYTES = 4 << 20
JSON_DEPTH = 100
PICTURE_BYTES = 8 << 20
TABLE_BYTES = 1 << 20
TABLE_ROWS = 1000
TABLE_COLUMNS = 100
CELL_LETTERS = 2000
CHART_SERIES = 50
CHART_POINTS = 1000
TRACEBACK_BYTES = 32 << 10
RESULTS = 200


def cut_text(text: str, notes: list[str], what: str = "text") -> str:
    """Return the beginning of a text that is too long."""
    if len(text) <= TEXT_BYTES:
        return text
    notes.append(f"{what}: the first {TEXT_BYTES:,} of {len(text):,} characters")
    return text[:TEXT_BYTES]


def plain(value: Any) -> Any:
    """Return a scalar as JSON has it: no NaN, no infinity, and text for whatever JSON does not know."""
    kind = type(value)
    if kind is str:
        return value if len(value) <= CELL_LETTERS else value[:CELL_LETTERS] + "…"
    if kind is int or kind is bool or value is None:
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    return _plain_object(value)


def _plain_object(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        text = value.isoformat()
        return None if text == "NaT" else text
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a scalar of numpy
        inner = value.item()
        return str(value) if type(inner) is type(value) else plain(inner)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if str(value) in ("<NA>", "NaT"):
        return None
    if isinstance(value, (list, tuple, dict)):
        try:
            return plain(json.dumps(value, default=str, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError):
            return plain(str(value))
    return plain(str(value))
