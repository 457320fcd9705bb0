"""A context: one line of cells that share their state, in one language."""

from __future__ import annotations

import abc
import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from skep.errors import InvalidRequest, SandboxLost
from skep.sandbox.capture import Capture, Feed, Listeners, OnResult, OnText
from skep.sandbox.deadline import Deadline
from skep.sandbox.kernel import Kernel, Nowhere, drain, gone, pump
from skep.sandbox.mark import KEY
from skep.sandbox.results import Cell, CellError, Done, Event, Language, Outcome

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Exit, Process, Sandbox
    from skep.sandbox.shell import Shell

#: How long an interrupted cell may take to come to its end before its kernel is killed.
GRACE_S = 2.0
State = Literal["new", "idle", "busy", "closed"]


class Context(abc.ABC):
    """One line of cells. Cells given at once run one after the other."""

    language: Language

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        self.name = name
        self.cells = 0
        self.state: State = "new"
        self._sandbox = sandbox
        self._turn = asyncio.Lock()
        self._lost = False

    def say_lost(self) -> None:
        """Have the next cell say that what an earlier one knew is gone."""
        self._lost = True

    async def run(
        self,
        code: str,
        *,
        key: str | None = None,
        timeout_s: float | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_result: OnResult | None = None,
    ) -> Cell:
        """Run a cell to its end. Whatever the code does is in the cell; a sandbox that is lost is `SandboxLost`.

        When the time is up (without one, that of the sandbox's commands) the cell is interrupted, and its kernel
        killed if that does not help; `math.inf` is no limit. Cancelling the call interrupts the cell too. `key` is the
        cell's own SKEP_IDEMPOTENCY_KEY, for it and for what it starts.
        """
        listeners = Listeners(on_stdout, on_stderr, on_result)
        return await self._run(code, Capture(self._sandbox.limits.output_bytes, listeners), timeout_s, key=key)

    async def stream(self, code: str, *, timeout_s: float | None = None) -> AsyncGenerator[Event, None]:
        """Run a cell and yield what it prints and shows as it comes, and at last the `Cell`.

        All that is printed comes through; the cell waits for a reader who is slow. Leaving early interrupts it.
        """
        feed = Feed(self._sandbox.limits.output_bytes)
        running = asyncio.create_task(self._run(code, feed, timeout_s))
        running.add_done_callback(lambda _: feed.close())
        try:
            while (event := await feed.next()) is not None:
                yield event
            yield await running
        finally:
            if not running.done():
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running

    @abc.abstractmethod
    async def interrupt(self) -> None:
        """Break into the running cell, if there is one."""

    async def give_up(self, *, within_s: float = GRACE_S) -> None:  # noqa: B027 - what has no kernel ends with its call
        """End a cell that still runs though its call was cancelled, by the end of its kernel if it takes too long."""

    @abc.abstractmethod
    async def restart(self) -> None:
        """Forget all state; a cell that runs is ended. The next cell says that it starts fresh."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End it and what it runs."""

    def _was_lost(self) -> bool:
        """Say once that the state of earlier cells is gone."""
        lost, self._lost = self._lost, False
        return lost

    @abc.abstractmethod
    async def _cell(self, code: str, capture: Capture, deadline: Deadline, *, key: str | None) -> Cell: ...

    async def _run(self, code: str, capture: Capture, timeout_s: float | None, *, key: str | None = None) -> Cell:
        async with self._turn:
            if self.state == "closed":
                raise InvalidRequest(f"the context {self.name!r} is closed", hint="open it again by its name")
            self.state = "busy"
            self.cells += 1
            began = time.monotonic()
            deadline = Deadline(self._sandbox.limits.time_for(timeout_s), GRACE_S)
            try:
                cell = await self._cell(code, capture, deadline, key=key)
            finally:
                deadline.cancel()
                if self.state == "busy":
                    self.state = "idle"
            stdout, stderr = capture.end()
            return replace(
                cell,
                stdout=stdout,
                stderr=stderr,
                results=tuple(capture.results),
                truncated=capture.truncated,
                duration_s=time.monotonic() - began,
            )


class KernelContext(Context):
    """A context whose state is the memory of a kernel."""

    def __init__(self, sandbox: Sandbox, name: str, language: Language, start: Callable[[], Awaitable[Kernel]]) -> None:
        super().__init__(sandbox, name)
        self.language = language
        self._start = start
        self._kernel: Kernel | None = None

    async def start(self) -> Kernel:
        """Start its kernel ahead of the first cell."""
        async with self._turn:
            return await self._ready()

    async def interrupt(self) -> None:
        if self.state == "busy" and self._kernel is not None:
            await self._kernel.interrupt()

    async def give_up(self, *, within_s: float = GRACE_S) -> None:
        async with self._turn:
            kernel = self._kernel
            if kernel is not None:
                await self._settle(kernel, within_s)
                if kernel.running is not None:
                    await self._discard()

    async def restart(self) -> None:
        kernel = self._kernel
        if kernel is not None:
            with suppress(SandboxLost):
                await kernel.process.kill()
        async with self._turn:
            if self._kernel is not None:
                await self._discard()

    async def close(self) -> None:
        await self.restart()
        self.state = "closed"

    async def _cell(self, code: str, capture: Capture, deadline: Deadline, *, key: str | None) -> Cell:
        kernel = await self._ready()
        if not await kernel.give(self.cells, code, key):
            await self._discard()
            kernel = await self._ready()
            if not await kernel.give(self.cells, code, key):
                return await self._died(kernel, deadline, restarted=self._was_lost())
        restarted = self._was_lost()
        deadline.start(kernel.interrupt, kernel.process.kill)
        try:
            done = await kernel.collect(capture)
        except asyncio.CancelledError:
            await kernel.interrupt()  # the next cell waits for this one to end, or ends it
            raise
        if done is None:
            return await self._died(kernel, deadline, restarted=restarted)
        return self._judge(done, deadline, restarted=restarted)

    async def _ready(self) -> Kernel:
        """Return a kernel that waits for a cell, a fresh one if need be."""
        kernel = self._kernel
        if kernel is not None:
            await self._settle(kernel)
        if kernel is not None and (not kernel.alive or kernel.running is not None):
            await self._discard()
        if self._kernel is None:
            self._kernel = await self._start()
        return self._kernel

    async def _settle(self, kernel: Kernel, within_s: float = GRACE_S) -> None:
        """Bring a cell that was given up to its end, if that can be done soon."""
        attempts = 8
        for _ in range(attempts):
            if not kernel.alive or kernel.running is None:
                return
            # Once more each time: one that comes before the cell has begun is lost.
            await kernel.interrupt()
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s / attempts):
                    await kernel.collect(Nowhere())

    async def _discard(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            self._lost = True
            await kernel.end()

    async def _died(self, kernel: Kernel, deadline: Deadline, *, restarted: bool) -> Cell:
        exit = await kernel.ended()
        await self._discard()
        note = "The kernel is gone, and with it all variables; the next cell starts with none."
        if deadline.passed:
            note = f"The time of {deadline.after_s:g} s was up and the cell did not stop. {note}"
        return Cell(
            self.cells,
            "timeout" if deadline.passed else "died",
            error=gone(exit),
            restarted=restarted,
            state_lost=True,
            exit=exit,
            note=note,
        )

    def _judge(self, done: Done, deadline: Deadline, *, restarted: bool) -> Cell:
        note = "The kernel was started afresh: variables of earlier cells are gone." if restarted else ""
        if deadline.passed:
            stopped = f"The time of {deadline.after_s:g} s was up and the cell was interrupted; its variables are kept."
            return Cell(self.cells, "timeout", error=done.error, restarted=restarted, note=f"{note} {stopped}".strip())
        outcome: Outcome = "interrupted" if done.interrupted else "error" if done.error else "ok"
        return Cell(self.cells, outcome, error=done.error, restarted=restarted, note=note)


class BashContext(Context):
    """A context whose state is what a lasting shell saves after each command."""

    language: Language = "bash"

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        super().__init__(sandbox, name)
        self._shell: Shell | None = None
        self._process: Process | None = None
        self._interrupted = False

    async def interrupt(self) -> None:
        if self._process is not None:
            self._interrupted = True
            await self._process.signal(signal.SIGINT)

    async def restart(self) -> None:
        if self._process is not None:
            await self._process.kill()
        async with self._turn:
            if self._shell is not None:
                await self._shell.close()
                self._lost, self._shell = True, None

    async def close(self) -> None:
        with suppress(SandboxLost):
            await self.restart()
        self.state = "closed"

    async def _cell(self, code: str, capture: Capture, deadline: Deadline, *, key: str | None) -> Cell:
        if self._shell is None:
            self._shell = await self._sandbox.shell()
        restarted, self._interrupted = self._was_lost(), False
        self._process = process = await self._sandbox.start(self._shell.argv(code), env={KEY: key} if key else None)
        deadline.start(partial(process.signal, signal.SIGINT), process.kill)
        try:
            exit = await self._carry(process, capture)
        except asyncio.CancelledError:
            await process.kill()
            raise
        finally:
            self._process = None
            process.release()
        return self._judge(exit, deadline, restarted=restarted)

    async def _carry(self, process: Process, capture: Capture) -> Exit:
        pumps = [
            asyncio.create_task(pump(process.stdout, "stdout", capture)),
            asyncio.create_task(pump(process.stderr, "stderr", capture)),
        ]
        try:
            exit = await process.wait()
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        drain(process, capture)
        return exit

    def _judge(self, exit: Exit, deadline: Deadline, *, restarted: bool) -> Cell:
        if exit.code == 0 and not deadline.passed:
            return Cell(self.cells, "ok", restarted=restarted, exit=exit)
        how = f"signal {exit.signal}" if exit.signal else f"code {exit.code}"
        limit = f", by the limit on {exit.limit}" if exit.limit else ""
        error = CellError("CommandFailed", f"the command ended with {how}{limit}", "")
        note = ""
        if deadline.passed:
            note = f"The time of {deadline.after_s:g} s was up and the command was ended; the state before it holds."
        outcome: Outcome = "timeout" if deadline.passed else "interrupted" if self._interrupted else "error"
        return Cell(self.cells, outcome, error=error, restarted=restarted, exit=exit, note=note)
