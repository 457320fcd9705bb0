"""The controller's side of one kernel: a process inside that runs cells and answers over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from skep.errors import InvalidRequest, LimitReached, SandboxLost
from skep.sandbox.results import CellError, Done, Message, Ready, Result, Shown, read_message
from skep.sandbox.sandbox import Exit, Process, Stream

if TYPE_CHECKING:
    import socket

    from skep.sandbox.sandbox import Sandbox

_READY_S = 60.0
_MOST_BYTES = 48 << 20
_HEAD_BYTES = 4
_PIECE = 1 << 18
#: What a pipe can hold: no more than this was printed by a cell that has ended and is not read yet.
_PIPE_BYTES = 1 << 20
_END_S = 2.0


class Sink(Protocol):
    """Where the output and the results of a cell go. `room` is awaited before more is read."""

    def printed(self, stream: str, data: bytes) -> None: ...
    def shown(self, result: Result) -> None: ...
    async def room(self) -> None: ...


class Nowhere:
    """A sink for what nobody waits for any more."""

    def printed(self, stream: str, data: bytes) -> None:
        pass

    def shown(self, result: Result) -> None:
        pass

    async def room(self) -> None:
        pass


class Kernel:
    """A running kernel. Cells are given to it one at a time."""

    def __init__(self, sandbox: Sandbox, process: Process, channel: socket.socket) -> None:
        self.process = process
        self.version = ""
        self.missing: tuple[str, ...] = ()
        #: The cell that was given to it and has not been answered.
        self.running: int | None = None
        self._sandbox = sandbox
        self._interrupted = False
        self._channel = channel
        self._received = bytearray()
        self._loop = asyncio.get_running_loop()
        self._watch = asyncio.create_task(self._end_of_process())

    @classmethod
    async def start(cls, sandbox: Sandbox, argv: Sequence[str], *, env: Mapping[str, str]) -> Kernel:
        """Start a kernel and wait until it serves; one that cannot is `InvalidRequest` with what it said."""
        process = await sandbox.start(argv, env=env, channel=True)
        assert process.channel is not None
        kernel = cls(sandbox, process, process.channel)
        try:
            await kernel._ready()
        except BaseException:
            await kernel.end()
            raise
        return kernel

    @property
    def alive(self) -> bool:
        return not self._watch.done()

    async def give(self, number: int, code: str, key: str | None = None) -> bool:
        """Hand it a cell; say whether it was still there to take it."""
        if self._interrupted:
            await self._let_signals_arrive()
        body = json.dumps({"cell": number, "code": code, "key": key}).encode()
        self.running = number  # from the first byte on: half a request leaves the kernel waiting for the rest
        try:
            await self._loop.sock_sendall(self._channel, len(body).to_bytes(_HEAD_BYTES, "big") + body)
        except OSError:
            return False
        return True

    async def collect(self, sink: Sink) -> Done | None:
        """Carry what the given cell prints and shows until it is done; None if the kernel ended instead."""
        pumps = [
            asyncio.create_task(pump(self.process.stdout, "stdout", sink)),
            asyncio.create_task(pump(self.process.stderr, "stderr", sink)),
        ]
        try:
            done = await self._answers(sink)
        finally:
            await _cancelled(pumps)
        drain(self.process, sink)
        return done

    async def interrupt(self) -> None:
        """Send Ctrl-C to the kernel and to the programs that the cell started."""
        self._interrupted = True
        await self.process.signal(signal.SIGINT)

    async def ended(self) -> Exit:
        """Return how it ended, ending it if it only stopped talking; raise `SandboxLost` if all is gone."""
        try:
            async with asyncio.timeout(_END_S):
                return await self.process.wait()
        except TimeoutError:
            await self.process.kill()
            return await self.process.wait()

    async def end(self) -> None:
        """Kill it and close what this side holds of it."""
        with contextlib.suppress(SandboxLost):
            await self.process.kill()
            await self.process.wait()
        await self._watch
        self.process.release()

    async def _end_of_process(self) -> None:
        # A process left behind may hold the other end of the socket open: its end is told here, not there.
        with contextlib.suppress(SandboxLost):
            await self.process.wait()
        with contextlib.suppress(OSError):
            self._channel.shutdown(2)

    async def _let_signals_arrive(self) -> None:
        """Wait until an interrupt for an earlier cell has been delivered: a late one would meet the next cell."""
        # A sandbox carries orders out one after the other, so whatever is answered now was asked after the signal.
        with contextlib.suppress(LimitReached):
            await self._sandbox.run(["/bin/true"])
        self._interrupted = False

    async def _ready(self) -> None:
        try:
            async with asyncio.timeout(_READY_S):
                message = await self._receive()
        except TimeoutError:
            message = None
        if not isinstance(message, Ready):
            said = self.process.stderr.read_now().decode(errors="replace").strip()
            raise InvalidRequest(
                f"the kernel did not start: {said[-2000:] or 'it gave no reason'}",
                hint=f"check that {self.process.argv[0]} works in the sandbox",
            )
        self.version, self.missing = message.version, message.missing

    async def _answers(self, sink: Sink) -> Done | None:
        while True:
            await sink.room()
            message = await self._receive()
            match message:
                case None:
                    return None
                case Shown(cell=cell, result=result) if cell == self.running:
                    drain(self.process, sink)  # what was printed before it is there already
                    sink.shown(result)
                    await asyncio.sleep(0)
                case Done(cell=cell) if cell == self.running:
                    self.running = None
                    return message
                case _:
                    continue  # about a cell that was given up

    async def _receive(self) -> Message | None:
        """Return the next message; None at the end, and for anything that is no message, which is the end too."""
        # Nothing is taken before all of it is there: a call that is cancelled meanwhile must lose no part.
        if not await self._have(_HEAD_BYTES):
            return None
        end = _HEAD_BYTES + int.from_bytes(self._received[:_HEAD_BYTES], "big")
        if end > _MOST_BYTES or not await self._have(end):
            return None
        body = bytes(self._received[_HEAD_BYTES:end])
        del self._received[:end]
        try:
            return read_message(body)
        except ValueError:
            return None

    async def _have(self, count: int) -> bool:
        """Receive until so many bytes are there; say whether they came."""
        while len(self._received) < count:
            try:
                piece = await self._loop.sock_recv(self._channel, _PIECE)
            except OSError:
                piece = b""
            if not piece:
                return False
            self._received += piece
            if len(piece) == _PIECE:
                await asyncio.sleep(0)  # a socket that is never empty must not keep the loop to itself
        return True


async def pump(stream: Stream, name: str, sink: Sink) -> None:
    """Carry a stream into a sink, to its end."""
    while chunk := await stream.read():
        sink.printed(name, chunk)
        await asyncio.sleep(0)
        await sink.room()


def drain(process: Process, sink: Sink) -> None:
    """Carry what a process has already printed."""
    for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
        taken = 0
        while taken < _PIPE_BYTES and (chunk := stream.read_now()):
            sink.printed(name, chunk)
            taken += len(chunk)


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def gone(exit: Exit) -> CellError:
    """Put the end of a kernel into words."""
    how = f"signal {exit.signal}" if exit.signal else f"code {exit.code}"
    limit = f", ended by the limit on {exit.limit}" if exit.limit else ""
    return CellError("KernelDied", f"the kernel ended with {how}{limit}", "")
