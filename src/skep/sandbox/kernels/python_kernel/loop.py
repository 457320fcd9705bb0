"""Answer one request after the other until the controller is gone."""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import types
import warnings
from typing import Any, NoReturn

from . import bounds
from .cell import Runner, explain, remember
from .display import describe, describe_bundle
from .magics import Magics, translate
from .output import Flusher
from .wire import Channel, Interrupts

_KEY = "SKEP_IDEMPOTENCY_KEY"
_environ = os.environ  # a cell may put something else in its place


class Kernel:
    """One context's variables, and the running of cells among them."""

    def __init__(self, channel: Channel, interrupts: Interrupts, flusher: Flusher) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._flusher = flusher
        self._cell = 0
        self._shown = 0
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self._namespace = module.__dict__
        self._runner = Runner(self._namespace)
        self._namespace.update(__builtins__=builtins, __skep__=Magics(self._namespace, self._run_part, flusher.flush))
        builtins.display = self.display  # type: ignore[attr-defined]
        builtins.input = _no_input

    def display(self, *values: Any, raw: bool = False) -> None:
        """Show values now, in every format that they offer; with `raw`, dictionaries of media types as they are."""
        for value in values:
            self._publish(describe_bundle(value) if raw and isinstance(value, dict) else describe(value))

    def answer(self, request: dict[str, Any]) -> None:
        """Run one cell and say how it ended."""
        self._cell, self._shown = request["cell"], 0
        _mark(request.get("key"))
        error: BaseException | None
        self._interrupts.install()
        try:
            error = self._outcome(request["code"])
        except KeyboardInterrupt as raised:  # in the very moment of the cell's end
            error = raised
        self._interrupts.forbid()
        told = None if error is None else explain(error)
        self._flusher.flush()
        interrupted = isinstance(error, KeyboardInterrupt)
        self._channel.send({"type": "done", "cell": self._cell, "error": told, "interrupted": interrupted})

    def _outcome(self, code: str) -> BaseException | None:
        """Run a cell and return what it raised."""
        try:
            try:
                self._interrupts.allow()
                self._run(code)
            finally:
                self._publish_figures()
        except BaseException as raised:  # noqa: BLE001  whatever a cell raises is its result, SystemExit too
            return raised
        finally:
            self._interrupts.forbid()
        return None

    def _run(self, code: str) -> None:
        name = f"<cell {self._cell}>"
        remember(code, name)
        value = self._runner.run(translate(code), name)
        if value is not None:
            self._publish(describe(value), main=True)

    def _run_part(self, code: str) -> Any:
        return self._runner.run(code, f"<cell {self._cell}>")

    def _publish(self, formats: dict[str, Any], *, main: bool = False) -> None:
        self._shown += 1
        if self._shown > bounds.RESULTS:
            formats = {"text": "", "notes": [f"only the first {bounds.RESULTS} results of a cell are kept"]}
        if self._shown <= bounds.RESULTS + 1:
            self._flusher.flush()  # what was printed before it is seen before it
            self._channel.send({"type": "result", "cell": self._cell, "result": {**formats, "main": main}})

    def _publish_figures(self) -> None:
        figures = sys.modules.get(f"{__package__}.figures")
        if figures is not None:
            figures.show()


class PyplotWatch:
    """Sits first among the finders of modules and does one thing: pyplot, once imported, draws for the kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "matplotlib.pyplot":
            sys.meta_path.remove(self)
            self._choose()

    def _choose(self) -> None:
        import matplotlib

        from . import figures

        figures.publish = self._kernel.display
        if str(matplotlib.rcParams["backend"]).lower() == "agg":
            matplotlib.use(f"module://{figures.__name__}")
        # A cell that insists on Agg itself is still shown its figures.
        warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")


def _mark(key: str | None) -> None:
    """Put the cell's key where the programs that it starts find it, until the next cell has one or none."""
    _environ.pop(_KEY, None)
    if key is not None:
        _environ[_KEY] = key


def _no_input(prompt: object = "") -> NoReturn:
    raise EOFError("input() has nobody to ask here: put the value into the code")


def main() -> None:
    interrupts = Interrupts()
    interrupts.install()
    channel = Channel.take_stdin(interrupts)
    flusher = Flusher()
    kernel = Kernel(channel, interrupts, flusher)
    sys.meta_path.insert(0, PyplotWatch(kernel))
    sys.path.insert(0, "")
    preload, sys.argv = sys.argv[1:], [""]
    missing = [name for name in preload if not _import(name)]
    flusher.flush()
    channel.send({"type": "ready", "version": ".".join(map(str, sys.version_info[:3])), "missing": missing})
    while (request := channel.receive()) is not None:
        kernel.answer(request)
    flusher.flush()
    os._exit(0)


def _import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
