"""Run a command for a framework, which brings limits of its own for each call."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Mapping
from contextlib import suppress

from skep.errors import InvalidRequest, SandboxLost
from skep.sandbox.sandbox import Command, Execution, Process, Sandbox, Stream, User

#: When a command has ended and something it left behind holds its pipes open: how long they may be silent, and how
#: long they are read at all.
_SILENCE_S = 0.2
_LINGER_S = 2.0


async def carry_out(
    sandbox: Sandbox,
    command: Command,
    *,
    keep_bytes: int,
    timeout_s: float | None = None,
    input: bytes = b"",
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: User = "agent",
) -> Execution:
    """Run a command for as long as it takes, or `timeout_s`; the sandbox's own limits of time do not hold.

    One that prints more than `keep_bytes` to either stream is ended, and its execution is `truncated`.
    """
    began = time.monotonic()
    process = await sandbox.start(command, cwd=cwd, env=env, user=user, stdin=bool(input), timeout_s=timeout_s)
    try:
        return await _Capture(process, keep_bytes).take(input, began)
    except asyncio.CancelledError:
        with suppress(SandboxLost):
            await process.kill()
        raise
    finally:
        process.release()


class _Capture:
    """What a process prints, up to a limit at which it is ended."""

    def __init__(self, process: Process, keep_bytes: int) -> None:
        self._process = process
        self._keep = keep_bytes
        self._out, self._err = bytearray(), bytearray()
        self._overflowed = False

    async def take(self, data: bytes, began: float) -> Execution:
        process = self._process
        readers = [
            asyncio.create_task(self._collect(process.stdout, self._out)),
            asyncio.create_task(self._collect(process.stderr, self._err)),
        ]
        feeder = asyncio.create_task(self._feed(data)) if data else None
        try:
            ended = await process.wait()
            await self._drain(readers)
        finally:
            for task in (*readers, feeder):
                if task is not None:
                    task.cancel()
        duration_s = time.monotonic() - began
        return Execution(ended, bytes(self._out), bytes(self._err), duration_s, self._overflowed)

    async def _collect(self, stream: Stream, into: bytearray) -> None:
        async for chunk in stream:
            into += chunk[: self._keep + 1 - len(into)]
            if len(into) > self._keep:
                del into[self._keep :]
                self._overflowed = True
                await self._process.kill()
                return

    async def _feed(self, data: bytes) -> None:
        await self._process.write(data)
        await self._process.close_stdin()

    async def _drain(self, readers: list[asyncio.Task[None]]) -> None:
        deadline = time.monotonic() + _LINGER_S
        had = -1
        while had != (had := len(self._out) + len(self._err)) and time.monotonic() < deadline:
            _, reading = await asyncio.wait(readers, timeout=_SILENCE_S)
            if not reading:
                break
        for reader in readers:
            if reader.done():
                reader.result()


def refused_with(error: InvalidRequest) -> int:
    """Return the exit code by which a shell tells of a command that could not be started."""
    return 126 if os.strerror(errno.EACCES) in error.message else 127
