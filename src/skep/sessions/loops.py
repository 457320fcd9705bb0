"""What a process does again and again for as long as it lives: begun anew where it breaks, and seen where it stalls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog

from skep.errors import SkepError, Unavailable

_AGAIN_S = 1.0

T = TypeVar("T")
Loop = Callable[[], Awaitable[None]]


class Loops:
    """The loops of a process by what they are for: one that had no good round for `stall_s` counts as stalled."""

    def __init__(self, *, stall_s: float | None = None) -> None:
        self._stall_s = stall_s
        self._kept: dict[str, asyncio.Task[None]] = {}
        #: When the last good round of each ended.
        self._well: dict[str, float] = {}
        self._log = structlog.get_logger("skep.loops")

    @asynccontextmanager
    async def kept(self, loops: Mapping[str, Loop]) -> AsyncIterator[None]:
        """Have each of them go on until the end of the block."""
        for name, loop in loops.items():
            self.went_well(name)
            self._kept[name] = asyncio.create_task(self._keep(name, loop), name=f"skep keeps {name}")
        try:
            yield
        finally:
            for task in self._kept.values():
                task.cancel()
            await asyncio.wait(self._kept.values())

    async def _keep(self, name: str, loop: Loop) -> None:
        while True:
            running = asyncio.ensure_future(loop())
            try:
                await asyncio.wait([running])
            finally:
                running.cancel()  # if it is this that was cancelled
                await asyncio.wait([running])
            error = None if running.cancelled() else running.exception()
            self._log.error("loop_ended", loop=name, error=str(error or "cancelled"), exc_info=error)
            await asyncio.sleep(_AGAIN_S)

    async def attempt(self, name: str, work: Awaitable[T]) -> T | None:
        """Do one round of a loop: a database that is away for a while must not end it."""
        # The outcome is a value here: whatever went wrong, the next round may go well.
        (outcome,) = await asyncio.gather(work, return_exceptions=True)
        if isinstance(outcome, BaseException):
            unforeseen = None if isinstance(outcome, SkepError) else outcome
            self._log.warning("round_failed", loop=name, error=str(outcome), exc_info=unforeseen)
            return None
        self.went_well(name)
        return outcome

    def went_well(self, name: str) -> None:
        self._well[name] = time.monotonic()

    def check(self) -> None:
        """Raise Unavailable if one of the loops has ended, or has not gone round well for long."""
        for name, task in self._kept.items():
            if task.done():
                raise Unavailable(f"{name} has ended", hint="start the process anew")
            quiet_s = time.monotonic() - self._well[name]
            if self._stall_s is not None and quiet_s > self._stall_s:
                raise Unavailable(f"{name} has not gone well for {quiet_s:.0f} s", hint="the log says why")
