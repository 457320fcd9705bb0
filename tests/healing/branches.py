"""Find the branches of a module that a piece of code does not take, down to each `and` and `or`."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

Arc = tuple[str, int, int]


def missed(module: ModuleType, run: Callable[[], object]) -> list[str]:
    """Run something; return where in the module a condition went one way only, as `line name`."""
    file = str(module.__file__)
    taken = _taken(file, run)
    code = compile(Path(file).read_text(), file, "exec")
    return sorted({f"{line} {name}" for line, arc in _possible(code) if (name := arc[0]) and arc not in taken})


def _taken(file: str, run: Callable[[], object]) -> set[Arc]:
    arcs: set[Arc] = set()

    def enter(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != file:
            return None
        frame.f_trace_opcodes, last = True, -1

        def step(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
            nonlocal last
            if event == "opcode":
                arcs.add((_key(frame.f_code), last, frame.f_lasti))
                last = frame.f_lasti
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return arcs


def _possible(code: CodeType) -> Iterator[tuple[int, Arc]]:
    """Yield both ways of each condition of the functions in a module, with the line."""
    steps, line = list(dis.get_instructions(code)), code.co_firstlineno
    for step, after in pairwise(steps):
        line = step.starts_line or line
        if "JUMP" in step.opname and "IF" in step.opname and code.co_name != "<module>":
            yield from ((line, (_key(code), step.offset, target)) for target in (step.argval, after.offset))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _possible(inner)


def _key(code: CodeType) -> str:
    return f"{code.co_qualname}:{code.co_firstlineno}"
