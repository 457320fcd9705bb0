"""A process that a native agent has started, seen from the controller."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal as signals
import socket
import struct
import termios
from collections.abc import Callable, Sequence

from skep.errors import InvalidRequest, SandboxLost
from skep.sandbox.agent import Agent, Report, Spawn
from skep.sandbox.limits import LimitName
from skep.sandbox.pipes import NoStream, ReadEnd, WriteEnd, make_pipe
from skep.sandbox.sandbox import Exit, Process, Size

#: Between the polite signal and the final one when a command's time is up.
_GRACE_S = 0.5
_END_OF_FILE = b"\x04"

Judge = Callable[[Report], LimitName | None]


class AgentProcess(Process):
    """A process on pipes of the controller's own, or on a terminal of the sandbox."""

    def __init__(self, agent: Agent, argv: Sequence[str], judge: Judge) -> None:
        self._agent = agent
        self._judge = judge
        self._ended = asyncio.Event()
        self._stdin: WriteEnd | None = None
        self._terminal = False
        self._timer: asyncio.TimerHandle | None = None
        self._limit: LimitName | None = None
        self._order_id = 0
        self.argv = argv

    @classmethod
    async def start(
        cls,
        agent: Agent,
        spawn: Spawn,
        *,
        judge: Judge,
        owner: tuple[int, int] | None,
        stdin: bool,
        channel: bool,
        terminal: Size | None,
        timeout_s: float | None,
    ) -> AgentProcess:
        process = cls(agent, spawn.argv, judge)
        if terminal is None:
            await process._on_pipes(spawn, owner, stdin=stdin, channel=channel)
        else:
            await process._on_terminal(spawn, terminal)
        if timeout_s is not None and process.exit is None:
            process._timer = asyncio.get_running_loop().call_later(timeout_s, process._out_of_time)
        return process

    async def wait(self) -> Exit:
        await self._ended.wait()
        if self.exit is None:
            raise SandboxLost("the sandbox died under the command", hint="resolve the session and try again")
        return self.exit

    async def write(self, data: bytes) -> None:
        if self._stdin is None:
            raise InvalidRequest("the process was started without standard input", hint="start it with stdin=True")
        await self._stdin.write(data)

    async def close_stdin(self) -> None:
        if self._stdin is not None:
            if self._terminal:
                await self._stdin.write(_END_OF_FILE)
            else:
                self._stdin.close()

    async def signal(self, number: int, *, group: bool = True) -> None:
        if self.exit is None:
            await self._agent.signal(self._order_id, number, leader_only=not group)

    async def resize(self, size: Size) -> None:
        if self._stdin is None or not self._terminal:
            raise InvalidRequest("the process has no terminal", hint="start it with a terminal size")
        if self._stdin.is_open:
            fcntl.ioctl(self._stdin.fd, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))

    def release(self) -> None:
        for end in (self._stdin, self.stdout, self.stderr):
            if isinstance(end, ReadEnd | WriteEnd):
                end.close()
        if self.channel is not None:
            self.channel.close()

    def stop_for(self, limit: LimitName) -> None:
        """End the process because of a limit, which its exit will then name."""
        if self.exit is None:
            self._limit = limit
            self._signal_soon(signals.SIGKILL)

    async def _on_pipes(self, spawn: Spawn, owner: tuple[int, int] | None, *, stdin: bool, channel: bool) -> None:
        out, out_inside = make_pipe(owner)
        err, err_inside = make_pipe(owner)
        self.stdout, self.stderr = ReadEnd(out), ReadEnd(err)
        in_inside = self._input(owner, stdin=stdin, channel=channel)
        try:
            report = await self._agent.spawn(spawn, self._on_exit, fds=(in_inside, out_inside, err_inside))
        except BaseException:
            self.release()
            raise
        finally:
            for fd in (in_inside, out_inside, err_inside):
                os.close(fd)
        self._begin(report)

    def _input(self, owner: tuple[int, int] | None, *, stdin: bool, channel: bool) -> int:
        """Make what the process reads from; return the end that it gets."""
        if channel:
            self.channel, theirs = socket.socketpair()
            self.channel.setblocking(False)
            return theirs.detach()
        if not stdin:
            return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        reading, writing = make_pipe(owner)
        self._stdin = WriteEnd(writing)
        return reading

    async def _on_terminal(self, spawn: Spawn, size: Size) -> None:
        report = await self._agent.spawn(spawn, self._on_exit, terminal=(size.rows, size.columns))
        self._terminal = True
        self.stdout, self.stderr = ReadEnd(report.fd), NoStream()
        self._stdin = WriteEnd(os.dup(report.fd))
        self._begin(report)

    def _begin(self, report: Report) -> None:
        self.pid = report.a
        self._order_id = report.id
        self.id = f"p{report.id}"

    def _on_exit(self, report: Report | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()
        if report is None:
            return
        killed = report.b or None
        self.exit = Exit(
            code=None if killed else report.a,
            signal=killed,
            limit=self._judge(report) or self._limit,
            cpu_s=(report.user_us + report.system_us) / 1e6,
            peak_bytes=report.peak_kb * 1024,
        )

    def _out_of_time(self) -> None:
        if self.exit is None:
            self._limit = "time"
            self._signal_soon(signals.SIGTERM, doom=True)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_GRACE_S, self._signal_soon, signals.SIGKILL)

    def _signal_soon(self, number: int, *, doom: bool = False) -> None:
        task = asyncio.ensure_future(self._deliver(number, doom))
        _deliveries.add(task)
        task.add_done_callback(_deliveries.discard)

    async def _deliver(self, number: int, doom: bool) -> None:
        try:
            if self.exit is None:
                await self._agent.signal(self._order_id, number, doom=doom)
        except SandboxLost:
            return  # nothing is left to be signalled


#: Signals on their way: the event loop itself holds tasks only weakly.
_deliveries: set[asyncio.Task[None]] = set()
