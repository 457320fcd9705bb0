"""Show what a cell gave: tables as tables, pictures as files, the rest as text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from skep.cli.terminal import console, print_cells, print_line, printable

if TYPE_CHECKING:
    from skep.sandbox.results import Cell, Chart, Result, Scalar, Table

_ROWS = 40
_TIME_UP = 124


def show_result(result: Result, *, cell: int, pictures: Path) -> None:
    """Print one result; a picture is saved in a folder and its path printed."""
    saved = [_save(data, kind, cell, pictures) for kind, data in _pictures(result)]
    for path in saved:
        print_line(f"picture: {path}")
    for chart in result.charts:
        _aside(_chart_line(chart))
    if result.data is not None:
        _show_table(result.data)
    elif not saved:
        print_line(result.markdown or result.latex or result.text)
    for note in result.notes:
        _aside(note)


def show_end(cell: Cell) -> int:
    """Say on standard error how a cell ended when it did not end well; return the exit code for it."""
    if cell.error is not None and cell.outcome != "interrupted":
        traceback = cell.error.traceback or f"{cell.error.name}: {cell.error.message}"
        console(stderr=True).print(printable(traceback.rstrip("\n")), style="red", markup=False, soft_wrap=True)
    if cell.outcome == "interrupted":
        sys.stderr.write("\nskep: interrupted\n")
    if cell.note:
        sys.stderr.write(f"skep: {cell.note}\n")
    return exit_code(cell)


def exit_code(cell: Cell) -> int:
    """Return the exit code that tells a shell how a cell ended."""
    match cell.outcome:
        case "ok":
            return 0
        case "interrupted":
            return 130
        case "timeout":
            return _TIME_UP
        case "died" if cell.exit is not None and cell.exit.status:
            return cell.exit.status
        case _:
            return 1


def _pictures(result: Result) -> list[tuple[str, bytes]]:
    svg = result.svg.encode() if result.svg else None
    found = (("png", result.png), ("jpeg", result.jpeg), ("svg", svg))
    return [(kind, data) for kind, data in found if data]


def _save(data: bytes, kind: str, cell: int, folder: Path) -> Path:
    """Write a picture under a name that nothing has yet."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        number += 1
        path = folder / f"cell-{cell}-{number}.{kind}"
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            continue
        return path


def _show_table(table: Table) -> None:
    if not sys.stdout.isatty():
        print_cells(*(column.name for column in table.columns))
        for row in table.rows:
            print_cells(*map(_cell, row))
        return
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(header_style="bold", show_edge=False, pad_edge=False)
    for column in table.columns:
        numeric = column.type.lower().startswith(("int", "uint", "float"))
        shown.add_column(Text(printable(column.name)), justify="right" if numeric else "left", overflow="fold")
    for row in table.rows[:_ROWS]:
        shown.add_row(*(Text(printable(_cell(value)), style="dim" if value is None else "") for value in row))
    console().print(shown)
    more = f", the first {_ROWS} shown" if len(table.rows) > _ROWS else ""
    _aside(f"{table.total_rows:,} rows x {table.total_columns:,} columns{more}")


def _cell(value: Scalar) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.6g}"
        case _:
            return str(value)


def _chart_line(chart: Chart) -> str:
    points = sum(len(one.points) for one in chart.series)
    title = f" {chart.title!r}" if chart.title else ""
    return f"chart: {chart.kind}{title}, {len(chart.series)} series, {points:,} points"


def _aside(text: str) -> None:
    """Print what is about the result and not part of it, for people alone."""
    if sys.stdout.isatty():
        console().print(printable(text), style="dim", markup=False)
