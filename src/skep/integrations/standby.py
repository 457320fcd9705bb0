"""A sandbox that is made when it is first needed, for callers in any thread and on any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from skep.sandbox.blocking import elsewhere
from skep.sandbox.sandbox import Sandbox


class Standby:
    """The sandbox to be; both methods run on the loop that waiting calls share, by `wait` or `elsewhere`."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Sandbox]]) -> None:
        self._make = make
        self._stack = AsyncExitStack()
        self._opening: asyncio.Task[Sandbox] | None = None

    async def sandbox(self) -> Sandbox:
        """Return the sandbox, made by the first who asks; that it is being made outlives a cancelled caller."""
        if self._opening is None or _failed(self._opening):
            self._opening = asyncio.create_task(self._stack.enter_async_context(self._make()))
        return await asyncio.shield(self._opening)

    async def close(self) -> None:
        """End the sandbox if there is one; the next who asks gets a new one."""
        opening, self._opening = self._opening, None
        if opening is not None:
            await asyncio.wait([opening])
        await self._stack.aclose()


async def ended(standby: Standby) -> None:
    """End a sandbox from any loop, also for a caller who is cancelled already."""
    await asyncio.shield(asyncio.ensure_future(elsewhere(standby.close())))


def _failed(task: asyncio.Task[Sandbox]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
