"""The time of a cell: first it is interrupted, then its process is killed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from skep.errors import SandboxLost

Act = Callable[[], Awaitable[None]]


class Deadline:
    """Counts from `start` on until it is cancelled."""

    def __init__(self, after_s: float, grace_s: float) -> None:
        self.after_s = after_s
        self.passed = False
        self._grace_s = grace_s
        self._watch: asyncio.TimerHandle | None = None
        self._acting: asyncio.Task[None] | None = None

    def start(self, interrupt: Act, kill: Act) -> None:
        if math.isfinite(self.after_s):
            self._watch = asyncio.get_running_loop().call_later(self.after_s, self._pass, interrupt, kill)

    def cancel(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._acting is not None:
            self._acting.cancel()

    def _pass(self, interrupt: Act, kill: Act) -> None:
        self.passed = True
        self._acting = asyncio.create_task(self._stop(interrupt, kill))

    async def _stop(self, interrupt: Act, kill: Act) -> None:
        with suppress(SandboxLost):
            await interrupt()
            await asyncio.sleep(self._grace_s)
            await kill()
