"""The workspaces that a sandbox had before the present one.

When the last user of an overlay leaves, the kernel first writes out whatever is dirty on its disk. After much was
written that takes long, and holds up whoever else waits for the disk; later it is done anyway. So what was swapped for
another is kept in use until then.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque

#: By now the kernel has written out by itself what was dirty.
_LATER_S = 40.0
#: How many are kept at most; the oldest goes first.
_MOST = 16


class Former:
    """Folders that were mounted at /workspace, held by descriptors."""

    def __init__(self) -> None:
        self._held: deque[int] = deque()
        self._timers: deque[asyncio.TimerHandle] = deque()

    def keep(self, fd: int) -> None:
        """Take over a descriptor of a workspace that is no longer mounted."""
        self._held.append(fd)
        self._timers.append(asyncio.get_running_loop().call_later(_LATER_S, self._let_go))
        if len(self._held) > _MOST:
            self._let_go()

    def close(self) -> None:
        """Let go of all of them, without waiting."""
        while self._held:
            self._let_go()

    def _let_go(self) -> None:
        self._timers.popleft().cancel()
        threading.Thread(target=os.close, args=(self._held.popleft(),), daemon=True).start()
