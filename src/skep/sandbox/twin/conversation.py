"""The controller's side of the stream to a twin: orders go in, reports come out.

What a twin says is hostile: the sandbox it runs in is the agent's. Frames have a limit, streams have their credit,
whatever does not fit ends the conversation, and no number from it is used as more than a label.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

from skep.errors import SandboxLost, SkepError
from skep.sandbox.link import Link
from skep.sandbox.twin.answer import Answer
from skep.sandbox.twin.inside import wire
from skep.sandbox.twin.inside.wire import Violation

#: How often a twin that is silent is asked for a sign of life.
_ASK_S = 0.5
#: How long the house may take to say whether it stands.
_HOUSE_S = 5.0
#: The most that one turn hands to the link at once.
_PIECE = 1 << 20


class Party(Protocol):
    """Whoever has opened something by an id, and hears what is said of it."""

    def hear(self, kind: int, payload: bytes) -> None:
        """Take a report; one that is never made is a `Violation`."""

    def lose(self) -> None:
        """Learn that there will be no more reports."""


class Conversation:
    """Whole from `begin` to `close`, or until the twin goes."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._parser = wire.Parser(wire.REPORT_LIMIT)
        self._parties: dict[int, Party] = {}
        self._next_id = 0
        self._waiting = bytearray()
        self._to_say = asyncio.Event()
        self._greeted: asyncio.Future[int] = self._loop.create_future()
        self._heard_at = self._loop.time()
        self._tasks: list[asyncio.Task[None]] = []
        #: Set once the twin is gone, by whatever means.
        self.lost = asyncio.Event()
        #: What made it end, for the message of whoever waited.
        self.why = "its stream closed"

    async def begin(self) -> None:
        """Start to listen and to speak; return when the twin has said that it serves."""
        for work in (self._listen(), self._speak()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._ended)
            self._tasks.append(task)
        version = await self._greeted
        if version != wire.VERSION:
            self.lose(f"its twin is of version {version}")
            raise self.gone()

    def open(self, party: Party) -> int:
        """Return an id by which a party is known from now on."""
        if self.lost.is_set():
            raise self.gone()
        self._next_id += 1
        self._parties[self._next_id] = party
        return self._next_id

    def forget(self, number: int) -> None:
        """Let a party go; what is still said to it is dropped."""
        self._parties.pop(number, None)

    def say(self, kind: int, number: int, payload: bytes = b"") -> None:
        """Send an order; after the end of the conversation it goes nowhere."""
        if not self.lost.is_set():
            self._waiting += wire.frame(kind, number, payload)
            self._to_say.set()

    async def ask(self, kind: int, payload: bytes = b"") -> Answer:
        """Send a question and return the answer to it, which may be that it could not be."""
        answer = Answer()
        number = self.open(answer)
        self.say(kind, number, payload)
        try:
            return await answer.given()
        finally:
            self.forget(number)

    async def watch_over(
        self, alive: Callable[[], Awaitable[bool]], *, resting: Callable[[], bool], patience_s: float
    ) -> None:
        """End the conversation when the house says that it is gone, or nothing has been heard for too long.

        A house that rests is expected to be silent. Whatever ends it, the twin is then hung up on.
        """
        while not self.lost.is_set():
            if resting():
                self._heard_at = self._loop.time()
            silent_s = self._loop.time() - self._heard_at
            if silent_s > patience_s:
                self.lose("it gave no sign of life")
            elif silent_s > 2 * _ASK_S and await _is_gone(alive):
                self.lose("its house is gone")
            elif silent_s > _ASK_S:
                self.say(wire.PING, 0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), _ASK_S)
        await self._link.close()

    def gone(self) -> SandboxLost:
        return SandboxLost(f"the sandbox is gone: {self.why}", hint="resolve the session or create a new sandbox")

    async def close(self) -> None:
        """Hang up; the twin and all it started die of it."""
        self.lose("it was stopped")
        await self._link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def lose(self, why: str) -> None:
        if self.lost.is_set():
            return
        self.why = why
        self.lost.set()
        self._to_say.set()
        if not self._greeted.done():
            self._greeted.set_exception(self.gone())
            self._greeted.exception()  # nobody may be waiting for it
        parties, self._parties = self._parties, {}
        for party in parties.values():
            party.lose()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self.lose(str(error) if isinstance(error, Violation) else "its stream closed")

    async def _listen(self) -> None:
        with contextlib.suppress(SandboxLost, OSError):
            while (data := await self._link.read()) and not self.lost.is_set():
                self._heard_at = self._loop.time()
                for report in self._parser.feed(data):
                    self._take(report)

    async def _speak(self) -> None:
        with contextlib.suppress(SandboxLost, OSError):
            while not self.lost.is_set():
                await self._to_say.wait()
                self._to_say.clear()
                while self._waiting and not self.lost.is_set():
                    piece = bytes(memoryview(self._waiting)[:_PIECE])
                    del self._waiting[: len(piece)]
                    await self._link.write(piece)
                    if len(piece) == _PIECE:  # a question waits behind all of this, and so does its answer
                        self._heard_at = self._loop.time()

    def _take(self, report: wire.Frame) -> None:
        if report.id > self._next_id:
            raise Violation("its twin spoke of something that nobody asked for")
        if report.id == 0:
            self._greet(report)
        elif (party := self._parties.get(report.id)) is not None:
            party.hear(report.kind, report.payload)
        # Otherwise nobody waits for it any more.

    def _greet(self, report: wire.Frame) -> None:
        if report.kind == wire.PONG and not report.payload:
            return
        if report.kind != wire.READY or self._greeted.done() or len(report.payload) != wire.COUNTED.size:
            raise Violation("its twin said something that it never says")
        self._greeted.set_result(wire.COUNTED.unpack(report.payload)[0])


async def _is_gone(alive: Callable[[], Awaitable[bool]]) -> bool:
    """Ask the house; one that cannot be asked just now may still stand."""
    try:
        async with asyncio.timeout(_HOUSE_S):
            return not await alive()
    except (SkepError, OSError, TimeoutError):
        return False
