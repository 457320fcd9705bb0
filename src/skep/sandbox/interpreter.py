"""The code interpreter: cells of Python, bash and JavaScript in a sandbox, in contexts that keep their state."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Self

from skep.errors import Conflict, InvalidRequest, NotFound
from skep.sandbox.context import BashContext, Context, KernelContext
from skep.sandbox.kernel import Kernel
from skep.sandbox.results import Cell, Language

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Sandbox

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SYSTEM_PYTHON = "/usr/bin/python3"
# The folder of the cells is not yet on the path: a file there must not stand in for a module of the kernel.
_BOOT = (
    "import sys; kernels = sys.argv.pop(1);"
    "path = [place for place in sys.path if place]; sys.path[:] = [*path, kernels];"
    "from python_kernel.loop import main; sys.path[:] = path; main()"
)
#: Matplotlib draws without a screen, and keeps its font cache out of the workspace.
_ENVIRONMENT = {"MPLBACKEND": "agg"}


class Interpreter:
    """The contexts of one sandbox, by name."""

    def __init__(
        self, sandbox: Sandbox, *, python: str | None = None, preload: Sequence[str] = (), owns_sandbox: bool = False
    ) -> None:
        """Take a sandbox to run cells in; nothing starts before the first.

        `python` is the interpreter inside; without it the workspace's `.venv` if there is one, or else the system's.
        `preload` names modules that each Python kernel imports before its first cell. With `owns_sandbox` closing
        the interpreter stops the sandbox.
        """
        self.sandbox = sandbox
        self._python = python
        self._preload = tuple(preload)
        self._owns_sandbox = owns_sandbox
        self._contexts: dict[str, Context] = {}

    def context(self, name: str = "default", *, language: Language = "python") -> Context:
        """Return the context of that name, a new one if there is none."""
        if name in self._contexts:
            found = self._contexts[name]
            if found.language != language:
                raise Conflict(
                    f"the context {name!r} runs {found.language}, not {language}",
                    hint="choose another name, or close it",
                )
            return found
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name[:60]!r} cannot name a context", hint="use up to 64 letters, digits, dots, dashes"
            )
        self._contexts[name] = self._new(name, language)
        return self._contexts[name]

    def contexts(self) -> list[Context]:
        """List the open contexts, oldest first."""
        return list(self._contexts.values())

    async def run(
        self, code: str, *, context: str = "default", language: Language = "python", timeout_s: float | None = None
    ) -> Cell:
        """Run a cell in a context, which is opened if need be."""
        return await self.context(context, language=language).run(code, timeout_s=timeout_s)

    async def warm(self, name: str = "default") -> Kernel:
        """Start the kernel of a Python context ahead of its first cell."""
        context = self.context(name)
        assert isinstance(context, KernelContext)
        return await context.start()

    async def close_context(self, name: str) -> None:
        """End a context and forget its state."""
        if name not in self._contexts:
            raise NotFound(f"no context {name[:60]!r}", hint="list them to see which there are")
        await self._contexts.pop(name).close()

    async def close(self) -> None:
        """End all contexts."""
        contexts, self._contexts = self._contexts, {}
        await asyncio.gather(*(context.close() for context in contexts.values()))
        if self._owns_sandbox:
            await self.sandbox.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _new(self, name: str, language: Language) -> Context:
        starts: dict[Language, Callable[[], Awaitable[Kernel]]] = {
            "python": self._start_python,
            "javascript": self._start_javascript,
        }
        if language == "bash":
            return BashContext(self.sandbox, name)
        if language not in starts:
            raise InvalidRequest(f"there is no kernel for {language!r}", hint="choose python, bash or javascript")
        return KernelContext(self.sandbox, name, language, starts[language])

    async def _start_python(self) -> Kernel:
        python = self._python or await self._find_python()
        argv = [python, "-c", _BOOT, self.sandbox.kernels, *self._preload]
        env = {**_ENVIRONMENT, "MPLCONFIGDIR": f"{self.sandbox.cache}/matplotlib"}
        return await Kernel.start(self.sandbox, argv, env=env)

    async def _find_python(self) -> str:
        own = f"{self.sandbox.home}/.venv/bin/python"
        try:
            await self.sandbox.files.stat(own)
        except NotFound:
            return _SYSTEM_PYTHON
        return own

    async def _start_javascript(self) -> Kernel:
        argv = ["node", "--expose-internals", "--no-warnings", f"{self.sandbox.kernels}/javascript_kernel.js"]
        found = await self.sandbox.run("command -v node")
        if not found.ok:
            raise InvalidRequest(
                "JavaScript needs node, which this sandbox does not have",
                hint="add node to the workspace's template, or install it on this machine",
            )
        return await Kernel.start(self.sandbox, argv, env={})
