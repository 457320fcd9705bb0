"""Requests that can be read, carried one after the other: each ruled on, each answered before the next."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from skep.sandbox.egress.dial import Unreachable
from skep.sandbox.egress.http import Answer, Framing, Head, Malformed
from skep.sandbox.egress.placeholders import Finder, Mask, readable, strays, swap
from skep.sandbox.egress.wire import LAST_CHUNK, Wire, body, carry_chunks, chunk, relay

if TYPE_CHECKING:
    from skep.sandbox.egress.connection import Connection


class Exchange:
    """The requests of one client. The next is read only when the one before has been answered whole.

    `secure` means that TLS was ended here; `ahead` is then the connection to the host, on its way. A client that
    knows it speaks to a proxy (`explicit`) may name another host with each request.
    """

    def __init__(
        self, connection: Connection, wire: Wire, *, explicit: bool = False, ahead: asyncio.Task[Wire] | None = None
    ) -> None:
        self._connection = connection
        self._wire = wire
        self._secure = ahead is not None
        self._explicit = explicit
        self._ahead = ahead
        self._upstream: Wire | None = None
        self._to: tuple[str, int] | None = None
        #: A part of an answer has been passed on, so that no message of ours may follow it.
        self.answering = False

    async def run(self) -> None:
        """Carry requests until either side ends."""
        while await self._wire.wait():
            async with asyncio.timeout(self._connection.head_s):
                request = await self._wire.head()
            if request is None or not await self._carry(request):
                return
            self.answering = False

    async def _carry(self, request: Head) -> bool:
        """Carry one request and its answer; say whether another may follow."""
        host, port = self._connection.destination(request, secure=self._secure, explicit=self._explicit)
        self._connection.rule(host, port)
        framing = request.framing
        if not request.wants_websocket:
            # Any other protocol could name hosts that nobody here would read. Servers may ignore the wish, so may we.
            request = request.without("upgrade", "http2-settings")
        reused = self._to == (host, port)
        upstream = await self._reach(host, port)
        sealed = await self._sealed(request, host, port)
        await upstream.write(self._connection.counted(sealed.encode()))
        if framing == 0:
            return await self._answer(upstream, sealed, reused=reused)
        return await self._carry_both(upstream, sealed, framing, reused=reused)

    async def _carry_both(self, upstream: Wire, request: Head, framing: Framing, *, reused: bool) -> bool:
        """Send the body while the answer is listened for: a server may want to be heard first, or refuse early."""
        sending = asyncio.ensure_future(self._send_body(upstream, framing))
        answering = asyncio.ensure_future(self._answer(upstream, request, reused=reused))
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                await answering
                return False
            sending.result()
            return await answering
        finally:
            for task in (sending, answering):
                task.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def _reach(self, host: str, port: int) -> Wire:
        if self._upstream is not None and (self._to != (host, port) or self._upstream.is_over):
            self._upstream.close()
            self._upstream = None
        if self._upstream is None:
            ahead, self._ahead = self._ahead, None
            self._upstream = await (ahead or self._connection.reach(host, port, tls=self._secure))
            self._to = (host, port)
        return self._upstream

    async def _sealed(self, head: Head, host: str, port: int) -> Head:
        """Put secrets where their placeholders stand, if this is the place for them; tell of those that stray."""
        outlet = self._connection.outlet
        for placeholder, place in strays(head, outlet.placeholders, host=host, port=port, secure=self._secure):
            outlet.note("stray_secret", name=placeholder.name, place=place, host=host)
        if not self._secure:
            return head
        head = readable(head)
        for placeholder in outlet.placeholders:
            at_home = placeholder.belongs_to(host, port)
            if at_home and any(placeholder.is_in(text) for text in head.values(placeholder.header)):
                value = await outlet.fetch(placeholder.name)
                if value is None:
                    raise Unreachable(f"the secret {placeholder.name} is not to be had now")
                head, secret = swap(head, placeholder, value)
                outlet.remember(secret)
                outlet.note("secret_used", name=placeholder.name, host=host)
        return head

    async def _send_body(self, upstream: Wire, framing: Framing) -> None:
        outlet = self._connection.outlet
        if not outlet.placeholders and isinstance(framing, int):
            await relay(self._wire, upstream, self._connection.count, framing)
            return
        finder = Finder(placeholder.text.encode() for placeholder in outlet.placeholders)
        async for piece in body(self._wire, framing):
            for text in finder.found(piece):
                self._connection.note_stray_body(text)
            await upstream.write(self._connection.counted(chunk(piece) if framing == "chunks" else piece))
        if framing == "chunks":
            await upstream.write(LAST_CHUNK)

    # The answer.

    async def _answer(self, upstream: Wire, request: Head, *, reused: bool) -> bool:
        """Carry what the host answers; say whether another request may follow."""
        mask = Mask(self._connection.outlet.known)
        while True:
            answer = await self._next_answer(upstream, reused=reused)
            if answer is None:
                return False
            if answer.status == 101 and not request.wants_websocket:
                raise Unreachable("the host changed the protocol without being asked")
            if mask and not answer.is_plain:
                raise Unreachable("the host compressed its answer, which could hide a secret in it")
            framing = self._framing(answer, request.method)
            self.answering = True
            await self._wire.write(self._connection.counted(mask.whole(answer.encode())))
            if not answer.is_interim:
                break
        if answer.status == 101:
            await self._connection.join(self._wire, upstream, mask=mask)
            return False
        await self._answer_body(upstream, framing, mask)
        return answer.stays and request.stays and framing != "end"

    async def _next_answer(self, upstream: Wire, *, reused: bool) -> Answer | None:
        self._connection.awaited_by = self._wire
        try:
            answer = await upstream.answer()
        except Malformed as problem:
            raise Unreachable(f"what the host answers is not HTTP ({problem})") from problem
        finally:
            self._connection.awaited_by = None
        if answer is None and not (reused or self.answering):
            raise Unreachable("the host closed the connection without an answer")
        return answer

    def _framing(self, answer: Answer, method: str) -> Framing:
        try:
            return answer.framing(method)
        except Malformed as problem:
            raise Unreachable(str(problem)) from problem

    async def _answer_body(self, upstream: Wire, framing: Framing, mask: Mask) -> None:
        if framing == 0:
            return
        if not mask and framing != "chunks":
            await relay(upstream, self._wire, self._connection.count, framing if isinstance(framing, int) else None)
        elif not mask:
            await carry_chunks(upstream, self._send)
        else:
            async for piece in body(upstream, framing):
                await self._send_masked(mask(piece), framing)
            await self._send_masked(mask.rest(), framing)
            if framing == "chunks":
                await self._send(LAST_CHUNK)

    async def _send_masked(self, piece: bytes, framing: Framing) -> None:
        if piece:
            await self._send(chunk(piece) if framing == "chunks" else piece)

    async def _send(self, data: bytes) -> None:
        await self._wire.write(self._connection.counted(data))
