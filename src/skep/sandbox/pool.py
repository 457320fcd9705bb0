"""Interpreters made ahead: a sandbox each, with a kernel that has its imports behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from skep.errors import InvalidRequest
from skep.sandbox.interpreter import Interpreter

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Sandbox


class InterpreterPool:
    """Keeps a number of warm interpreters; whoever takes one owns it, its sandbox too, and closes it.

    Each costs the memory of its kernel for as long as it waits: about 70 MB with numpy and pandas. Their workspaces
    are made ahead as well, so they are new ones and not those of a hive.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Sandbox]],
        *,
        size: int = 1,
        python: str | None = None,
        preload: Sequence[str] = ("numpy", "pandas"),
    ) -> None:
        if size < 1:
            raise InvalidRequest(f"a pool of {size} interpreters holds none", hint="ask for one or more")
        self._make = make
        self._python = python
        self._preload = tuple(preload)
        self._size = size
        self._warming: list[asyncio.Task[Interpreter]] = []

    async def take(self) -> Interpreter:
        """Return an interpreter whose default context is ready, and start warming the next."""
        while True:
            self._warming.sort(key=lambda task: not task.done())
            task = self._warming.pop(0) if self._warming else self._warm_one()
            self._fill()
            interpreter = await task
            if await interpreter.sandbox.alive():
                return interpreter
            await interpreter.close()

    @property
    def ready(self) -> int:
        """How many could be taken at once."""
        return sum(task.done() and not task.cancelled() and task.exception() is None for task in self._warming)

    async def fill(self) -> None:
        """Wait until as many are ready as the pool keeps."""
        self._fill()
        await asyncio.gather(*self._warming)

    async def close(self) -> None:
        """End the interpreters that nobody took."""
        warming, self._warming = self._warming, []
        for task in warming:
            task.cancel()
        for task in warming:
            with suppress(asyncio.CancelledError):
                await (await task).close()

    async def __aenter__(self) -> Self:
        await self.fill()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _fill(self) -> None:
        while len(self._warming) < self._size:
            self._warming.append(self._warm_one())

    def _warm_one(self) -> asyncio.Task[Interpreter]:
        return asyncio.create_task(self._warm())

    async def _warm(self) -> Interpreter:
        sandbox = await self._make()
        interpreter = Interpreter(sandbox, python=self._python, preload=self._preload, owns_sandbox=True)
        try:
            await interpreter.warm()
        except BaseException:
            await interpreter.close()
            raise
        return interpreter
