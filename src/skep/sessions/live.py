"""A session's computer in this process: its sandbox, and whether somebody works in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from skep.errors import SandboxLost, SkepError
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.shell import Shell
from skep.sessions.computers import Held
from skep.sessions.session import Session

if TYPE_CHECKING:
    from skep.sandbox.interpreter import Interpreter
    from skep.sandbox.ports import Exposure

#: A computer that answered so recently is not asked again.
_FRESH_S = 5.0
#: How long contexts for code are kept in which nothing is run.
_CONTEXTS_LAST = timedelta(minutes=15)
#: How long the sandbox has to run a command that does nothing.
PING_S = 2.0


class Live:
    """One running computer. `held` is None when another process runs it and this one has joined."""

    def __init__(
        self, session: Session, sandbox: Sandbox, held: Held | None, ending: AsyncExitStack, now: Callable[[], datetime]
    ) -> None:
        self.session = session
        self.sandbox = sandbox
        self.held = held
        self._ending = ending
        self._now = now
        self._uses = 0
        self._begun = 0
        self._retired = False
        self._answered = time.monotonic()
        self.used_at = self._called_at = now()
        #: The shells that were opened in it, by name, and the contexts for code.
        self.shells: dict[str, Shell] = {}
        #: The ports that were made reachable, until the sandbox ends.
        self.exposures: dict[int, Exposure] = {}
        self._interpreter: Interpreter | None = None
        #: Held while a shell or a context is opened.
        self.opening = asyncio.Lock()

    @property
    def joined(self) -> bool:
        return self.held is None

    @contextmanager
    def used(self) -> Iterator[Sandbox]:
        """Count as busy for as long as the block runs."""
        if self._retired:
            raise SandboxLost(f"the computer of {self.session.key} has been put away", hint="resolve the key again")
        self._uses += 1
        self._begun += 1
        try:
            yield self.sandbox
        finally:
            self._uses -= 1
            self.used_at = self._called_at = self._now()

    async def busy(self) -> bool:
        """Say whether a call, a stream or a process is under way; what is busy was in use just now."""
        busy = self._uses > 0 or await self.sandbox.occupied()
        if busy:
            self.used_at = self._now()
        return busy

    async def retire(self) -> bool:
        """Take no more work, unless some is under way or has come meanwhile; say whether it takes none."""
        begun = self._begun
        if await self.busy() or self._begun != begun:
            return False
        self._retired = True
        return True

    @property
    def interpreter(self) -> Interpreter:
        """The contexts for code in it."""
        from skep.sandbox.interpreter import Interpreter

        if self._interpreter is None:
            self._interpreter = Interpreter(self.sandbox)
        return self._interpreter

    async def tidy(self) -> None:
        """End the contexts that nobody used for long: each is a process, and would keep the computer up for ever."""
        if self._interpreter is not None and not self._uses and self._now() - self._called_at >= _CONTEXTS_LAST:
            await self._close_contexts()

    async def healthy(self) -> bool:
        """Say whether the computer answers."""
        if not await self.sandbox.alive():
            return False
        if time.monotonic() - self._answered < _FRESH_S:
            return True
        return await self.answers()

    async def answers(self) -> bool:
        """Run a command that does nothing, and say whether it ended in time."""
        try:
            async with asyncio.timeout(PING_S):
                done = await self.sandbox.run(["/bin/true"])
        except (TimeoutError, SkepError):
            return False
        self._answered = time.monotonic()
        return done.ok

    async def restart(self) -> None:
        """End the sandbox and start another over the same workspace."""
        if self.held is not None:
            await self.held.stop()
            self.sandbox = await self.held.sandbox()
            self.shells.clear()
            await self._close_contexts()

    async def end(self, *, patient: bool = False) -> None:
        """End the computer, or leave it if it is another's; the workspace stays.

        Processes that have joined lose it, unless it is to be `patient`: then they are waited for.
        """
        for exposure in self.exposures.values():
            await exposure.close()
        if self.held is not None and not patient:
            await self.held.leave()
        await self._ending.aclose()
        await self._close_contexts()

    async def _close_contexts(self) -> None:
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            with suppress(SandboxLost):
                await interpreter.close()
