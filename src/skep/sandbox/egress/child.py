"""One run of the proxy process, as its controller holds it: start it, tell it, hear it, end it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from skep.errors import SandboxUnusable

COMMAND = (sys.executable, "-P", "-m", "skep.sandbox.egress.proxy")
_READY_S = 15.0
_END_S = 2.0
_SAID_BYTES = 4096
_MESSAGE_BYTES = 64 << 10


class Child:
    """A proxy process and the socket to it. What it prints is kept, bounded, and shown to nobody else."""

    def __init__(self, hear: Callable[[dict[str, Any]], None], command: Sequence[str] = COMMAND) -> None:
        self._loop = asyncio.get_running_loop()
        self._heard = hear
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._said = bytearray()
        self.ended = asyncio.Event()
        self._ready = asyncio.Event()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._control.setblocking(False)
        self._output, output = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.pid = _spawn(command, theirs.fileno(), output)
        except BaseException:
            self._control.close()
            os.close(self._output)
            raise
        finally:
            theirs.close()
            os.close(output)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._control, self._hear)
        self._loop.add_reader(self._output, self._listen)
        self._loop.add_reader(self._pidfd, self._bury)

    @property
    def said(self) -> str:
        """The last that it printed."""
        return self._said.decode(errors="replace").strip()

    async def ready(self) -> None:
        """Wait until it serves, or say why it never will."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._ready, self.ended)]
        try:
            await asyncio.wait(waits, timeout=_READY_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self._ready.is_set():
            reason = self.said.splitlines()[-1:] or ["it gave no reason" if self.ended.is_set() else "it took too long"]
            raise SandboxUnusable(
                f"the proxy that sandboxes reach the network through does not start: {reason[0]}",
                hint="run the sandbox without a network, or fix what the message names",
            )

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Tell it something, in order, as soon as it listens. The descriptors are copied."""
        if self._control.fileno() < 0:
            return
        self._outbox.append((json.dumps(message).encode(), [os.dup(fd) for fd in fds]))
        if len(self._outbox) == 1:
            self._loop.add_writer(self._control, self._flush)
            self._flush()

    async def end(self) -> None:
        """Hang up and wait until it is gone, by force if need be."""
        self._hang_up()
        try:
            async with asyncio.timeout(_END_S):
                await self.ended.wait()
        except TimeoutError:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            await self.ended.wait()

    def _flush(self) -> None:
        while self._outbox:
            data, fds = self._outbox[0]
            try:
                socket.send_fds(self._control, [data], fds)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._hang_up()
                return
            self._outbox.popleft()
            _close(fds)
        self._loop.remove_writer(self._control)

    def _hear(self) -> None:
        for _ in range(64):
            try:
                data = self._control.recv(_MESSAGE_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up()
                return
            # It reads what strangers send, so what it says is not taken on trust.
            with contextlib.suppress(ValueError):
                message = json.loads(data)
                if isinstance(message, dict):
                    self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("event") == "ready":
            self._ready.set()
        else:
            self._heard(message)

    def _listen(self) -> None:
        try:
            data = os.read(self._output, _SAID_BYTES)
        except BlockingIOError:
            return
        self._said += data
        del self._said[:-_SAID_BYTES]
        if not data:
            self._loop.remove_reader(self._output)

    def _bury(self) -> None:
        self._listen()
        self._loop.remove_reader(self._output)
        os.close(self._output)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Where the program ignores SIGCHLD, the kernel reaps children by itself.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._hang_up()
        self.ended.set()

    def _hang_up(self) -> None:
        if self._control.fileno() < 0:
            return
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._control.close()
        for _, fds in self._outbox:
            _close(fds)
        self._outbox.clear()


def _spawn(command: Sequence[str], control: int, output: int) -> int:
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
    }
    nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    actions = [
        (os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate((nothing, output, output, control))
    ]
    try:
        return os.posix_spawn(command[0], list(command), environment, file_actions=actions, setsid=True)
    finally:
        os.close(nothing)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
