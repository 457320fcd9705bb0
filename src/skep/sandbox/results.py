"""What a code cell gives back, and the messages in which a kernel says so.

A kernel's messages are hostile input: whatever runs in a cell can write them itself. They are read here into these
types or refused; nothing in them is trusted beyond being shown as the outcome of that very cell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from skep.sandbox.sandbox import Exit

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Language = Literal["python", "bash", "javascript"]
Outcome = Literal["ok", "error", "interrupted", "timeout", "died"]
Scalar: TypeAlias = str | int | float | bool | None
Point: TypeAlias = tuple[Scalar, Scalar]

_BASE64 = {"val_json_bytes": "base64", "ser_json_bytes": "base64"}


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Table:
    """The beginning of a data frame; the totals say how large it is."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Scalar, ...], ...]
    total_rows: int
    total_columns: int

    @property
    def records(self) -> list[dict[str, Scalar]]:
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=False)) for row in self.rows]


@dataclass(frozen=True, slots=True)
class Box:
    """One box of a box plot: its whiskers, quartiles and median."""

    low: float | None = None
    q1: float | None = None
    median: float | None = None
    q3: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """One line, set of bars, cloud, pie (name and share) or box (its points are the outliers)."""

    kind: str
    label: str
    points: tuple[Point, ...]
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """The data of one pair of axes. The kind is line, bar, scatter, pie, box or mixed."""

    kind: str
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    x_unit: str | None = None
    y_unit: str | None = None
    x_scale: str = "linear"
    y_scale: str = "linear"
    legend: str = ""
    series: tuple[Series, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A value in every format that it offered. `main` marks the value of the cell's last expression."""

    text: str = ""
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: bytes | None = None
    jpeg: bytes | None = None
    json: Any = None
    latex: str | None = None
    data: Table | None = None
    charts: tuple[Chart, ...] = ()
    main: bool = False
    #: What was cut or left out for its size, and formats that failed.
    notes: tuple[str, ...] = ()

    __pydantic_config__ = _BASE64

    @property
    def size(self) -> int:
        texts = (self.text, self.html, self.markdown, self.svg, self.png, self.jpeg, self.latex)
        return sum(len(text) for text in texts if text)


@dataclass(frozen=True, slots=True)
class CellError:
    """What a cell raised; the traceback shows the frames of cells and of files in the workspace."""

    name: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Printed:
    """A piece of what a cell prints, while it runs."""

    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell that has ended.

    `restarted` says that it ran in a fresh kernel, without the variables of the cells before it; `state_lost` that
    its own variables and theirs are gone now.
    """

    number: int
    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    results: tuple[Result, ...] = ()
    error: CellError | None = None
    #: More was printed or shown than is kept.
    truncated: bool = False
    restarted: bool = False
    state_lost: bool = False
    #: How the process ended, where it did.
    exit: Exit | None = None
    duration_s: float = 0.0
    #: One sentence about an end that is neither success nor an error of the code.
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def value(self) -> Result | None:
        """The value of the last expression, if it had one."""
        return next((result for result in self.results if result.main), None)

    @property
    def text(self) -> str:
        """The text of that value."""
        return self.value.text if self.value else ""


Event = Printed | Result | Cell


@dataclass(frozen=True, slots=True)
class Ready:
    type: Literal["ready"]
    version: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Shown:
    type: Literal["result"]
    cell: int
    result: Result


@dataclass(frozen=True, slots=True)
class Done:
    type: Literal["done"]
    cell: int
    error: CellError | None = None
    interrupted: bool = False


Message = Ready | Shown | Done


def read_message(data: bytes) -> Message:
    """Return a kernel's message; one that is none is a `ValueError`."""
    return _messages().validate_json(data)


def cell_as_json(cell: Cell) -> dict[str, Any]:
    """Return a cell as JSON has it, with pictures in base64."""
    dumped: dict[str, Any] = _events()["cell"].dump_python(cell, mode="json")
    return dumped


def dump_event(event: Event) -> dict[str, Any]:
    """Return an event as JSON has it, with its kind."""
    kind = type(event).__name__.lower()
    return {"kind": kind, "event": _events()[kind].dump_python(event, mode="json")}


def read_event(dumped: Mapping[str, Any]) -> Event:
    """Return what `dump_event` wrote."""
    event: Event = _events()[dumped["kind"]].validate_json(json.dumps(dumped["event"]))
    return event


@cache
def _messages() -> TypeAdapter[Message]:
    from pydantic import Field, TypeAdapter

    return TypeAdapter(Annotated[Message, Field(discriminator="type")])


@cache
def _events() -> dict[str, TypeAdapter[Any]]:
    from pydantic import TypeAdapter

    return {"printed": TypeAdapter(Printed), "result": TypeAdapter(Result), "cell": TypeAdapter(Cell)}
