"""One connection to an exposed port: rule on its requests, and carry them in and the answers out."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

from skep.errors import SkepError
from skep.sandbox.egress.http import Answer, Framing, Head, Malformed, parse_answer, refusal
from skep.sandbox.ports.token import NotAdmitted, Token, Welcome
from skep.sandbox.ports.wire import Wire, carry_bytes, carry_chunks, carry_rest, join

_GOODBYE_S = 1.0
_SWITCHING = 101

Dial = Callable[[], Awaitable[socket.socket]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an exposure gives its visitors: how many at once, how long to ask, how long to be silent."""

    connections: int = 128
    head_s: float = 15.0
    idle_s: float = 900.0


class Visit:
    """A connection from its acceptance to its end. Without a token it is carried unread."""

    def __init__(self, client: socket.socket, dial: Dial, token: Token | None, bounds: Bounds) -> None:
        client.setblocking(False)
        self._client = Wire(client, self._moved)
        self._inside: Wire | None = None
        self._dial = dial
        self._token = token
        self._bounds = bounds
        self._clock = asyncio.timeout(bounds.head_s)
        #: Bytes that move give it more time; while a request's head is awaited they do not.
        self._flowing = False
        self._set_at = -math.inf
        self._answered = False
        self._reused = False

    async def serve(self) -> None:
        """Carry the connection; return when it has ended, for whatever reason."""
        await self._to_its_end(self._pass_through() if self._token is None else self._serve_requests(self._token))

    async def turn_away(self) -> None:
        """Say that there are too many, and end the connection."""
        await self._to_its_end(self._say_full())

    def close(self) -> None:
        for wire in (self._client, self._inside):
            if wire is not None:
                wire.close()

    async def _to_its_end(self, work: Coroutine[None, None, None]) -> None:
        try:
            async with self._clock:
                await work
        except (OSError, TimeoutError):
            pass  # either side went away, or time is up: closing says so
        finally:
            self.close()

    async def _say_full(self) -> None:
        if self._token is not None:
            await self._refuse(refusal("503", f"{self._bounds.connections} connections are open; close one first."))
            await self._say_goodbye()

    async def _pass_through(self) -> None:
        try:
            self._inside = Wire(await self._dial(), self._moved)
        except SkepError:
            return
        self._flow()
        await join(self._client, self._inside)

    async def _serve_requests(self, token: Token) -> None:
        try:
            while await self._client.ready():
                self._await_head()
                head = await self._client.head()
                if head is None:
                    break
                admitted = token.admit(head)
                if isinstance(admitted, Welcome):
                    await self._client.write(admitted.answer())
                    break
                self._flow()
                if not await self._exchange(admitted):
                    break
        except NotAdmitted as problem:
            await self._refuse(problem.answer())
        except Malformed as problem:
            await self._refuse(refusal("400", f"Skep does not pass this request on: {problem}."))
        except SkepError as problem:
            await self._refuse(refusal("502", f"{problem.message}.\n{problem.hint or ''}"))
        await self._say_goodbye()

    async def _exchange(self, request: Head) -> bool:
        """Carry one request in and its answer out; say whether the connection can take another."""
        length = request.length  # read before anything goes in: it may be malformed
        if request.upgrades and length != 0:
            raise Malformed("a request to change protocols has a body")
        inside = await self._reach()
        self._answered = False
        await inside.write(request.encode())
        body = asyncio.ensure_future(self._carry_body(length, inside))
        answer = asyncio.ensure_future(self._carry_answer(request, inside))
        try:
            done, _ = await asyncio.wait((body, answer), return_when=asyncio.FIRST_COMPLETED)
            if body in done:
                body.result()
            return await answer and await body
        finally:
            body.cancel()
            answer.cancel()
            await asyncio.gather(body, answer, return_exceptions=True)

    async def _reach(self) -> Wire:
        if self._inside is not None and not self._inside.usable():
            self._inside.close()
            self._inside = None
        self._reused = self._inside is not None
        if self._inside is None:
            self._inside = Wire(await self._dial(), self._moved)
        return self._inside

    async def _carry_body(self, length: int | None, inside: Wire) -> bool:
        """Carry a request's body in; say whether the server took all of it."""
        refused = False

        async def send(piece: bytes) -> None:
            nonlocal refused
            try:
                if not refused:
                    await inside.write(piece)
            except OSError:
                refused = True  # what it has answered still goes out

        if length is None:
            await carry_chunks(self._client, send)
        else:
            await carry_bytes(self._client, length, send)
        return not refused

    async def _carry_answer(self, request: Head, inside: Wire) -> bool:
        """Carry the answer out; say whether both sides stay for another."""
        while True:
            block = await inside.answer_head()
            if not block:
                return self._without_answer()
            self._answered = True
            await self._client.write(block)
            answer, framing = _read(block, request)
            if answer is not None and answer.status == _SWITCHING and request.upgrades:
                await join(self._client, inside)
                return False
            if answer is None or not answer.is_interim:
                await self._carry_answer_body(framing, inside)
                return answer is not None and framing != "end" and answer.stays and request.stays

    def _without_answer(self) -> bool:
        """Tell of a server that hung up. One that had answered before may only have grown tired of waiting."""
        if not self._reused:
            raise NotAdmitted("502", "The server inside ended the connection without an answer.")
        return False

    async def _carry_answer_body(self, framing: Framing, inside: Wire) -> None:
        match framing:
            case "end":
                await carry_rest(inside, self._client)
            case "chunks":
                await carry_chunks(inside, self._client.write)
            case int(length):
                await carry_bytes(inside, length, self._client.write)

    async def _refuse(self, answer: bytes) -> None:
        if not self._answered:
            await self._client.write(answer)

    async def _say_goodbye(self) -> None:
        """Let the visitor read to the end: closing on bytes that are still unread would take the last answer back."""
        self._client.end()
        self._flowing = False
        self._clock.reschedule(_now() + _GOODBYE_S)
        while await self._client.read():
            pass

    def _await_head(self) -> None:
        self._flowing = self._answered = False
        self._clock.reschedule(_now() + self._bounds.head_s)

    def _flow(self) -> None:
        self._flowing = True
        self._set_at = -math.inf
        self._moved()

    def _moved(self) -> None:
        now = _now()
        # Seldom: a fast stream would otherwise set the clock thousands of times a second.
        if self._flowing and now - self._set_at > self._bounds.idle_s / 8 and not self._clock.expired():
            self._set_at = now
            self._clock.reschedule(now + self._bounds.idle_s)


def _read(block: bytes, request: Head) -> tuple[Answer | None, Framing]:
    """Read the head of an answer, and how its body ends. What is not one goes on as it is, to the end."""
    if not block.endswith(b"\r\n\r\n"):
        return None, "end"
    try:
        answer = parse_answer(block)
        framing = answer.framing(request.method)
    except Malformed:
        return None, "end"
    return (None, "end") if answer.status == _SWITCHING and not request.upgrades else (answer, framing)


def _now() -> float:
    return asyncio.get_running_loop().time()
