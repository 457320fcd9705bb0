"""Run one cell in the lasting namespace, and put what it raises into words."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import traceback
from collections.abc import Coroutine
from types import CodeType
from typing import Any

from . import bounds

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_COROUTINE = 0x80  # of code objects; the module inspect takes as long to import as all else here
_KERNEL = os.path.dirname(__file__) + os.sep


class Runner:
    """Compiles and runs code whose last expression is its value; `await` works at the top level."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._loop: Any = None

    def run(self, source: str, name: str) -> Any:
        """Run a cell and return the value of its last expression, None without one; a closing `;` hides the value."""
        tree = compile(source, name, "exec", _FLAGS | ast.PyCF_ONLY_AST, dont_inherit=True)
        last = tree.body[-1] if tree.body else None
        shown = isinstance(last, ast.Expr) and not _silenced(source, last)
        if shown:
            tree.body.pop()
        if tree.body:
            self._execute(compile(tree, name, "exec", _FLAGS, dont_inherit=True))
        if not shown or not isinstance(last, ast.Expr):
            return None
        return self._execute(compile(ast.Expression(last.value), name, "eval", _FLAGS, dont_inherit=True))

    def _execute(self, code: CodeType) -> Any:
        value = eval(code, self._namespace)  # noqa: S307  running what it is given is the kernel's purpose
        return self._finish(value) if code.co_flags & _COROUTINE else value

    def _finish(self, work: Coroutine[Any, Any, Any]) -> Any:
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise


def _silenced(source: str, last: ast.Expr) -> bool:
    lines = source.encode().split(b"\n")
    rest = lines[(last.end_lineno or 1) - 1][last.end_col_offset or 0 :]
    return rest.lstrip().startswith(b";")


def remember(source: str, name: str) -> None:
    """Keep the text of a cell for tracebacks and `inspect.getsource`."""
    # Each line with its end, the last too: the marks below an expression are counted from there.
    lines = [f"{line}\n" for line in source.splitlines()]
    linecache.cache[name] = (len(source), None, lines, name)


def explain(error: BaseException) -> dict[str, Any]:
    """Return an error as its name, its message and a traceback of the user's own frames."""
    told = traceback.TracebackException.from_exception(error)
    _trim(told, set())
    notes: list[str] = []
    text = "".join(told.format())
    if len(text) > bounds.TRACEBACK_BYTES:
        half = bounds.TRACEBACK_BYTES // 2
        text = f"{text[:half]}\n  … {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"
    return {
        "name": type(error).__qualname__[:200],
        "message": bounds.cut_text(_message(error), notes)[: bounds.TRACEBACK_BYTES],
        "traceback": text,
    }


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  the error's own code
        return f"<{type(error).__name__} whose text cannot be had>"


def _trim(told: traceback.TracebackException, seen: set[int]) -> None:
    """Drop the kernel's own frames, and those inside libraries but the one that raised."""
    if id(told) in seen:
        return
    seen.add(id(told))
    frames = [frame for frame in told.stack if not frame.filename.startswith((_KERNEL, "<frozen "))]
    kept = [frame for n, frame in enumerate(frames) if n == len(frames) - 1 or _is_users(frame.filename)]
    told.stack = traceback.StackSummary.from_list(kept)
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _trim(other, seen)


def _is_users(filename: str) -> bool:
    libraries = (sys.prefix + os.sep, sys.base_prefix + os.sep)
    return "site-packages" not in filename and not filename.startswith(libraries)
