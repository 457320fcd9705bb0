"""What the server is to its clients beneath HTTP."""

from __future__ import annotations

import asyncio
import socket

from skep.app.service import bound
from skep.config import Settings


async def test_what_is_sent_does_not_wait_until_the_client_has_what_was_sent_before() -> None:
    settings = Settings.model_validate({"gateway": {"port": 0}})
    delays: asyncio.Queue[bool] = asyncio.Queue()

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_once = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        delays.put_nowait(not at_once)
        writer.close()

    with bound(settings) as listening:
        async with await asyncio.start_server(answer, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            async with asyncio.timeout(10):
                assert not await delays.get()
            writer.close()
            await writer.wait_closed()
