"""The browser window of one task, which stays open from one act to the next."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from skep.sessions.computer import Computer

if TYPE_CHECKING:
    from skep.sandbox.browser import Browser


class Window:
    """Holds a browser open in a task of its own: acts may come from different ones."""

    def __init__(self, computer: Computer, timeout_s: float) -> None:
        self._opened: asyncio.Future[Browser] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._holding = asyncio.create_task(self._hold(computer, timeout_s), name="skep window")

    @classmethod
    async def open(cls, computer: Computer, *, timeout_s: float) -> Window:
        window = cls(computer, timeout_s)
        try:
            both: list[asyncio.Future[Any]] = [window._opened, window._holding]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await window.close()
            raise
        if window._holding.done():
            window._opened.cancel()
            await window._holding  # which raises what went wrong
        return window

    @property
    def closed(self) -> bool:
        return self._holding.done()

    @property
    def browser(self) -> Browser:
        return self._opened.result()

    async def close(self) -> None:
        """Close it and end its browser."""
        self._closing.set()
        if not self._opened.done():
            self._holding.cancel()
        await asyncio.wait([self._holding])
        if not self._holding.cancelled():
            self._holding.exception()  # what goes wrong at the end concerns nobody any more

    async def _hold(self, computer: Computer, timeout_s: float) -> None:
        from skep.sandbox.browser import Browser

        async with computer.sandbox("exec") as sandbox, Browser.open(sandbox, timeout_s=timeout_s) as browser:
            self._opened.set_result(browser)
            await self._closing.wait()
