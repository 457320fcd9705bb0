"""What commands print: tables and lines for people, JSON for programs, progress on a terminal only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

#: The exit code of what Ctrl-C ended.
INTERRUPTED = 130
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]


def examples(*lines: str) -> str:
    """Build the end of a help text: each line a command, with what it does after two blanks and a #."""
    pairs = [line.partition("  # ")[::2] for line in lines]
    width = max((len(command) for command, purpose in pairs if purpose), default=0)
    shown = ["[bold]Examples[/bold]"]
    for command, purpose in pairs:
        safe = f"{command:<{width}}".replace("[", "\\[")
        shown.append(f"[green]$ {safe}[/green]" + (f"   [dim]{purpose}[/dim]" if purpose else ""))
    return "\n".join(shown)


def printable(text: str) -> str:
    """Escape what could move the cursor, colour the terminal or turn the reading direction."""
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1] for character in text
    )


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def print_json(value: Any) -> None:
    """Print one JSON value; to a terminal over several lines, to a program on one."""
    indent = 2 if sys.stdout.isatty() else None
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=False, default=str) + "\n")


def print_line(text: str) -> None:
    """Print one line as it is, save for characters that would play tricks on the terminal."""
    sys.stdout.write(printable(text) + "\n")


def print_cells(*cells: str) -> None:
    """Print one row for a pipe: cells separated by tabs, each on one line."""
    sys.stdout.write("\t".join(printable(cell).replace("\n", " ") for cell in cells) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Print rows under headings, or one sentence when there are none.

    Text that comes from elsewhere is not read as markup. A pipe gets tab-separated values without headings.
    """
    if not rows:
        console(stderr=True).print(f"[dim]{empty}[/dim]")
        return
    if not sys.stdout.isatty():
        for row in rows:
            print_cells(*row)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console().print(table)


def print_fields(fields: Mapping[str, str]) -> None:
    """Print a thing as name and value, one to a line."""
    width = max(map(len, fields))
    for name, value in fields.items():
        print_line(f"{name:<{width}}  {value}")


class Bar(Protocol):
    """What a long command tells about how far it is."""

    def add(self, count: int) -> None: ...
    def at(self, done: int, total: int) -> None: ...


class NoBar:
    def add(self, count: int) -> None:
        pass

    def at(self, done: int, total: int) -> None:
        pass


class TerminalBar:
    """A bar of rich."""

    def __init__(self, progress: Progress, what: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=total)

    def add(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def at(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Bar]:
    """Show a bar on stderr while the block runs, when stderr is a terminal; it vanishes at the end."""
    if not sys.stderr.isatty():
        yield NoBar()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as shown:
        yield TerminalBar(shown, what, total)
