"""The HTTP client of all providers, which reads no answer without an end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING

from httpx2 import AsyncByteStream, StreamError

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

#: One megabyte of text in pieces of one word each, with all that a protocol puts around them, is less than this.
MOST_BYTES = 64 * 1024 * 1024
#: Some decoders look at a whole line again with each piece of it, so a line without an end would stop the process.
LONGEST_LINE_BYTES = 8 * 1024 * 1024


class TooManyBytes(StreamError):
    """An answer is larger than any that can be used."""


class _Bounded(AsyncByteStream):
    def __init__(self, inner: AsyncByteStream) -> None:
        self._inner = inner

    @property
    def elapsed(self) -> timedelta | None:
        """How long the whole exchange took: the client asks its stream for it."""
        return getattr(self._inner, "elapsed", None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = line = 0
        async for piece in self._inner:
            seen += len(piece)
            last = piece.rfind(b"\n")
            line = line + len(piece) if last < 0 else len(piece) - last - 1
            if seen > MOST_BYTES or line > LONGEST_LINE_BYTES:
                raise TooManyBytes("the answer has more bytes than any that can be used")
            yield piece

    async def aclose(self) -> None:
        await self._inner.aclose()


#: The answers that were begun for the call that is being made.
_begun: ContextVar[list[Response] | None] = ContextVar("begun", default=None)


@asynccontextmanager
async def no_answer_left_open() -> AsyncIterator[None]:
    """Close what an SDK leaves open when it fails in the middle of an answer: it would hold its connection."""
    begun: list[Response] = []
    token = _begun.set(begun)
    try:
        yield
    finally:
        _begun.reset(token)
        for response in begun:
            await response.aclose()


async def _bound(response: Response) -> None:
    if isinstance(response.stream, AsyncByteStream):
        response.stream = _Bounded(response.stream)
    if (begun := _begun.get()) is not None:
        begun.append(response)


def open_client(timeout_s: float) -> AsyncClient:
    """Make the client; whoever asks for it closes it.

    The bound is a hook and no transport, because a client with a transport of its own ignores the proxies that the
    environment names.
    """
    from httpx2 import Timeout
    from pydantic_ai.models import create_async_httpx2_client

    client = create_async_httpx2_client(timeout=Timeout(timeout_s, connect=min(10.0, timeout_s)))
    client.event_hooks = {**client.event_hooks, "response": [_bound]}
    return client
