"""Write down what a tree consists of, while its content is on the way into the store."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field

from skep.workspace.archive.conveyor import Conveyor, Part, Piece, depends_on
from skep.workspace.archive.index import Row, encode_rows
from skep.workspace.archive.remembered import Extent, Remembered

#: Rows that are kept in one chunk: so many at least, and four times as many at most.
_RUN = 4096


@dataclass(slots=True)
class _Run:
    rows: list[Row] = field(default_factory=list)
    #: What the rows of files need, by the number of the row: the parts, and how the file was found.
    content: dict[int, tuple[list[Part], os.stat_result]] = field(default_factory=dict)


class Ledger:
    """Collects rows into runs, and stores each run when its content has got names."""

    def __init__(self, conveyor: Conveyor, remembered: Remembered) -> None:
        self._conveyor = conveyor
        self._remembered = remembered
        self._run = _Run()
        self._waiting: deque[_Run] = deque()
        self._pieces: list[Piece] = []
        self._chunks: dict[str, None] = {}
        self.count = 0

    def add(self, row: Row) -> None:
        self._run.rows.append(row)
        self.count += 1

    def add_file(self, row: Row, parts: list[Part], found: os.stat_result) -> None:
        if parts:
            self._run.content[len(self._run.rows)] = (parts, found)
        self.add(row)

    def may_end(self, path: str) -> None:
        """End the run after this path if it is a good place to, so that new files shift few of the runs."""
        count = len(self._run.rows)
        if count >= _RUN and (depends_on(path, 64) or count >= 4 * _RUN):
            self._end()
            # The content of the run that has just ended is still on its way; that of those before has most likely come.
            while len(self._waiting) > 1:
                self._store(self._waiting.popleft())

    def finish(self) -> tuple[list[str], list[str]]:
        """Store what is left; return the chunks that hold rows, and those that hold content."""
        self._end()
        while self._waiting:
            self._store(self._waiting.popleft())
        return [piece.chunk() for piece in self._pieces], list(self._chunks)

    def _end(self) -> None:
        self._conveyor.end_group()
        self._waiting.append(self._run)
        self._run = _Run()

    def _store(self, run: _Run) -> None:
        numbers: dict[str, int] = {}
        for place, (parts, found) in run.content.items():
            extents: list[Extent] = [
                (part.chunk() if isinstance(part, Piece) else part, offset, length) for part, offset, length in parts
            ]
            row = run.rows[place]
            self._remembered.note(found, (row.attributes, extents))
            run.rows[place] = row._replace(extents=_numbered(extents, numbers))
        self._chunks.update(dict.fromkeys(numbers))
        self._pieces.append(self._conveyor.send(encode_rows(list(numbers), run.rows)))


def _numbered(extents: list[Extent], numbers: dict[str, int]) -> list[int]:
    flat: list[int] = []
    for chunk, offset, length in extents:
        flat += (-1 if chunk is None else numbers.setdefault(chunk, len(numbers)), offset, length)
    return flat
