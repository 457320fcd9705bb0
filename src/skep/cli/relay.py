"""Join a process in a sandbox to this terminal or these pipes, so that it feels like a local one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Exit, Process, Size, Stream

_STDIN, _STDOUT, _STDERR = 0, 1, 2


def on_terminal() -> bool:
    """Say whether a person sits at both ends."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def window() -> Size:
    from skep.sandbox.sandbox import Size

    # The terminal's own answer: COLUMNS in the environment does not follow when a window is resized.
    columns, rows = os.get_terminal_size(_STDOUT)
    return Size(rows, columns)


async def relay(process: Process, *, terminal: bool) -> Exit:
    """Carry input, output and signals until the process ends; return how it ended."""
    with _raw(terminal), _signals(process, terminal=terminal):
        feeding = asyncio.ensure_future(_feed(process, terminal=terminal))
        carrying = [
            asyncio.ensure_future(_carry(process.stdout, _STDOUT)),
            asyncio.ensure_future(_carry(process.stderr, _STDERR)),
        ]
        try:
            ended = await process.wait()
            # What it printed last may still be on its way; a process that it left behind is not waited for.
            await asyncio.wait(carrying, timeout=0.2)
            return ended
        finally:
            for task in (feeding, *carrying):
                task.cancel()
            process.release()


async def _carry(stream: Stream, target: int) -> None:
    async for chunk in stream:
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]


async def _feed(process: Process, *, terminal: bool) -> None:
    """Pass standard input on. It is read in a thread: files and some devices cannot be waited for otherwise."""
    chunks: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            while chunk := os.read(_STDIN, 1 << 16):
                asyncio.run_coroutine_threadsafe(chunks.put(chunk), loop).result()
            asyncio.run_coroutine_threadsafe(chunks.put(b""), loop).result()
        except (OSError, RuntimeError):
            return  # standard input is closed, or the command is over

    threading.Thread(target=read, name="skep-stdin", daemon=True).start()
    while chunk := await chunks.get():
        await process.write(chunk)
    if not terminal:
        await process.close_stdin()


@contextmanager
def _raw(terminal: bool) -> Iterator[None]:
    """Hand every key to the process: its own terminal makes sense of them."""
    if not terminal:
        yield
        return
    before = termios.tcgetattr(_STDIN)
    tty.setraw(_STDIN)
    try:
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)


@contextmanager
def _signals(process: Process, *, terminal: bool) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def act(number: int) -> None:
        if number == signal.SIGWINCH:
            await process.resize(window())
        else:
            await process.signal(number)

    def passing(number: int) -> Callable[[], None]:
        def deliver() -> None:
            tasks.add(asyncio.ensure_future(act(number)))

        return deliver

    passed = [signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH if terminal else signal.SIGINT]
    for number in passed:
        loop.add_signal_handler(number, passing(number))
    try:
        yield
    finally:
        for number in passed:
            loop.remove_signal_handler(number)
