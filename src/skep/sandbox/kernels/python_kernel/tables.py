"""Data frames of pandas and polars as columns and rows."""

from __future__ import annotations

import json
import sys
from typing import Any

from . import bounds


def table(value: Any, notes: list[str]) -> dict[str, Any] | None:
    """Return a data frame or a series as a table, or None for anything else."""
    for kind in type(value).__mro__:
        library = kind.__module__.partition(".")[0]
        if kind.__name__ in ("DataFrame", "Series") and library in ("pandas", "polars"):
            columns, shape = (_pandas if library == "pandas" else _polars)(value, kind.__name__)
            return _bounded(columns, shape, notes)
    return None


Columns = list[tuple[str, str, list[Any]]]


def _pandas(value: Any, kind: str) -> tuple[Columns, tuple[int, int]]:
    pandas = sys.modules["pandas"]
    frame = value if kind == "DataFrame" else value.to_frame("value" if value.name is None else value.name)
    head = frame.iloc[: bounds.TABLE_ROWS, : bounds.TABLE_COLUMNS]
    columns: Columns = []
    if not isinstance(head.index, pandas.RangeIndex):
        for level in range(head.index.nlevels):
            values = head.index.get_level_values(level)
            name = values.name if values.name is not None else "index" if level == 0 else f"index {level}"
            columns.append((_name(name), str(values.dtype), values.tolist()))
    for position, label in enumerate(head.columns):
        series = head.iloc[:, position]
        columns.append((_name(label), str(series.dtype), series.tolist()))
    return columns, (frame.shape[0], frame.shape[1] + len(columns) - head.shape[1])


def _polars(value: Any, kind: str) -> tuple[Columns, tuple[int, int]]:
    frame = value if kind == "DataFrame" else value.to_frame()
    head = frame.head(bounds.TABLE_ROWS)
    columns = [(one.name, str(one.dtype), one.to_list()) for one in head.get_columns()[: bounds.TABLE_COLUMNS]]
    return columns, frame.shape


def _name(label: Any) -> str:
    return " / ".join(map(str, label)) if isinstance(label, tuple) else str(label)


def _bounded(columns: Columns, shape: tuple[int, int], notes: list[str]) -> dict[str, Any]:
    plain = [[bounds.plain(one) for one in values] for _, _, values in columns]
    rows = [list(row) for row in zip(*plain, strict=True)]
    while len(rows) > 1 and len(json.dumps(rows)) > bounds.TABLE_BYTES:
        del rows[len(rows) // 2 :]
    if len(rows) < shape[0]:
        notes.append(f"data: the first {len(rows):,} of {shape[0]:,} rows")
    if len(columns) < shape[1]:
        notes.append(f"data: the first {len(columns):,} of {shape[1]:,} columns")
    named: list[dict[str, str]] = []
    taken: set[str] = set()
    for name, kind, _ in columns:
        unique, number = name[:200], 1
        while unique in taken:
            unique, number = f"{name[:200]}.{number}", number + 1
        taken.add(unique)
        named.append({"name": unique, "type": kind[:100]})
    return {"columns": named, "rows": rows, "total_rows": shape[0], "total_columns": shape[1]}
