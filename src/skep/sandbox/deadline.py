"""The time of a cell: first it is interrupted, then its process is killed."""

from __future__ import annotations

import asyncio
import math
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from skep.errors import SandboxLost

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Process


class Deadline:
    """Counts from `start` on until it is cancelled."""

    def __init__(self, after_s: float, grace_s: float) -> None:
        self.after_s = after_s
        self.passed = False
        self._grace_s = grace_s
        self._watch: asyncio.TimerHandle | None = None
        self._act: asyncio.Task[None] | None = None

    def start(self, process: Process) -> None:
        if math.isfinite(self.after_s):
            self._watch = asyncio.get_running_loop().call_later(self.after_s, self._pass, process)

    def cancel(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._act is not None:
            self._act.cancel()

    def _pass(self, process: Process) -> None:
        self.passed = True
        self._act = asyncio.create_task(self._stop(process))

    async def _stop(self, process: Process) -> None:
        with suppress(SandboxLost):
            await process.signal(signal.SIGINT)
            await asyncio.sleep(self._grace_s)
            await process.kill()
