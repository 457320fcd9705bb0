"""A sandbox that is made when it is first needed, for callers in any thread and on any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TypeVar

from skep.errors import SandboxLost
from skep.sandbox.blocking import elsewhere
from skep.sandbox.sandbox import Sandbox

T = TypeVar("T")


class Standby:
    """The sandbox to be; its methods run on the loop that waiting calls share, by `wait` or `elsewhere`."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Sandbox]]) -> None:
        self._make = make
        self._stack = AsyncExitStack()
        self._opening: asyncio.Task[Sandbox] | None = None
        self._doubted = False

    async def sandbox(self) -> Sandbox:
        """Return the sandbox, made by the first who asks; that it is being made outlives a cancelled caller."""
        opening = self._opening
        if opening is not None and await self._useless(opening) and self._opening is opening:
            await self.close()
        if self._opening is None:
            # A stack of its own: the last one may still be closing.
            self._stack, self._doubted = AsyncExitStack(), False
            self._opening = asyncio.create_task(self._stack.enter_async_context(self._make()))
        return await asyncio.shield(self._opening)

    async def do(self, act: Callable[[Sandbox], Awaitable[T]]) -> T:
        """Do something with the sandbox; if it is lost meanwhile, whoever asks next gets another."""
        sandbox = await self.sandbox()
        try:
            return await act(sandbox)
        except SandboxLost:
            self._doubted = True
            raise

    async def close(self) -> None:
        """End the sandbox if there is one; the next who asks gets a new one."""
        opening, self._opening = self._opening, None
        if opening is not None:
            stack = self._stack
            await asyncio.wait([opening])
            await stack.aclose()

    async def _useless(self, opening: asyncio.Task[Sandbox]) -> bool:
        if not opening.done():
            return False
        if opening.cancelled() or opening.exception() is not None:
            return True
        # Not asked each time: of a machine elsewhere it takes a call over the network.
        return self._doubted and not await opening.result().alive()


async def ended(standby: Standby) -> None:
    """End a sandbox from any loop, also for a caller who is cancelled already."""
    await asyncio.shield(asyncio.ensure_future(elsewhere(standby.close())))
