"""A process that a twin has started, seen from the controller."""

from __future__ import annotations

import asyncio
import errno
import signal as signals
from collections.abc import Sequence

from skep.errors import InvalidRequest, SandboxLost
from skep.sandbox.agent import REFUSED, Report, Spawn, refusal
from skep.sandbox.limits import LimitName
from skep.sandbox.pipes import NoStream
from skep.sandbox.sandbox import Exit, Process, Size
from skep.sandbox.twin.conversation import Conversation
from skep.sandbox.twin.inside import wire
from skep.sandbox.twin.inside.wire import Violation
from skep.sandbox.twin.pulled import Carried, Inflow, Outflow, unpacked

#: Between the polite signal and the final one when a command's time is up.
_GRACE_S = 0.5
_PAYLOAD_LIMIT = 64 << 20
_END_OF_FILE = b"\x04"
#: The limits that a twin holds itself, by their number in an exit.
_HELD: tuple[LimitName | None, ...] = (None, "memory", "processes", "disk")
_LIMIT_SIGNALS: dict[int, LimitName] = {signals.SIGXCPU: "cpu", signals.SIGXFSZ: "disk"}


class TwinProcess(Process):
    """A process whose streams are carried by a conversation."""

    def __init__(self, conversation: Conversation, argv: Sequence[str], *, cpu_s: int | None) -> None:
        self._conversation = conversation
        self._cpu_s = cpu_s
        self._number = 0
        self._started: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._inflows: dict[int, Inflow] = {}
        self._stdin: Outflow | None = None
        self._carried: Carried | None = None
        self._terminal = False
        self._released = False
        self._timer: asyncio.TimerHandle | None = None
        self._limit: LimitName | None = None
        self.argv = argv

    @classmethod
    async def start(
        cls,
        conversation: Conversation,
        spawn: Spawn,
        *,
        cpu_s: int | None,
        stdin: bool,
        channel: bool,
        terminal: Size | None,
        timeout_s: float | None,
    ) -> TwinProcess:
        payload = spawn.payload()
        if len(payload) > _PAYLOAD_LIMIT:
            raise _refusal(errno.E2BIG, wire.AT_PAYLOAD, spawn)
        process = cls(conversation, spawn.argv, cpu_s=cpu_s)
        process._number = conversation.open(process)
        process._prepare(stdin=stdin, channel=channel, terminal=terminal is not None)
        size = terminal or Size(0, 0)
        kind = _input_kind(stdin=stdin, channel=channel, terminal=terminal is not None)
        conversation.say(wire.START, process._number, wire.START_HEAD.pack(kind, size.rows, size.columns) + payload)
        await process._begin(spawn)
        if timeout_s is not None and process.exit is None:
            process._timer = asyncio.get_running_loop().call_later(timeout_s, process._out_of_time)
        return process

    async def wait(self) -> Exit:
        await self._ended.wait()
        if self.exit is None:
            raise SandboxLost("the sandbox died under the command", hint="resolve the session and try again")
        return self.exit

    async def write(self, data: bytes) -> None:
        if self._stdin is None or self._carried is not None:
            raise InvalidRequest("the process was started without standard input", hint="start it with stdin=True")
        await self._stdin.write(data)

    async def close_stdin(self) -> None:
        if self._stdin is not None and self._carried is None:
            if self._terminal:
                await self._stdin.write(_END_OF_FILE)
            else:
                self._stdin.end()

    async def signal(self, number: int, *, group: bool = True) -> None:
        if self._ended.is_set() and self.exit is None:
            raise self._conversation.gone()
        if self.exit is None:
            self._signal(number, group=group)

    async def resize(self, size: Size) -> None:
        if not self._terminal:
            raise InvalidRequest("the process has no terminal", hint="start it with a terminal size")
        self._conversation.say(wire.RESIZE, self._number, wire.SIZE.pack(size.rows, size.columns))

    def release(self) -> None:
        if self._released:
            return
        self._released = True
        self._conversation.say(wire.RELEASE, self._number)
        for inflow in self._inflows.values():
            inflow.close()
        if self._stdin is not None:
            self._stdin.close()
        if self._carried is not None:
            self._carried.close()
        if self.channel is not None:
            self.channel.close()
        self._forget()

    def stop_for(self, limit: LimitName) -> None:
        """End the process because of a limit, which its exit will then name."""
        if self.exit is None:
            self._limit = limit
            self._signal(signals.SIGKILL)

    def hear(self, kind: int, payload: bytes) -> None:
        match kind:
            case wire.STARTED if not self._started.done():
                self._started.set_result((unpacked(wire.COUNTED, payload)[0], 0))
            case wire.REFUSED if not self._started.done():
                code, stage = unpacked(wire.REFUSAL, payload)
                self._started.set_result((-code, stage))
            case wire.STARTED if self._started.cancelled():
                pass  # the order to end it is on its way
            case wire.REFUSED if self._started.cancelled():
                self._settle()
            case wire.DATA if payload and payload[0] in self._inflows:
                self._inflows[payload[0]].put(payload[1:])
            case wire.END if len(payload) == 1 and payload[0] in self._inflows:
                self._inflows[payload[0]].end()
            case wire.TAKEN if self._stdin is not None:
                self._stdin.taken(payload)
            case wire.CLOSED if self._stdin is not None:
                self._stdin.close()
            case wire.EXITED if self._started.done() and self.exit is None:
                self._exited(payload)
            case _:
                raise Violation("its twin said something that it never says")

    def lose(self) -> None:
        if not self._started.done():
            self._started.set_exception(self._conversation.gone())
            self._started.exception()
        self._settle()
        for inflow in self._inflows.values():
            inflow.end()
        if self._stdin is not None:
            self._stdin.close()

    def _prepare(self, *, stdin: bool, channel: bool, terminal: bool) -> None:
        def inflow(stream: int) -> Inflow:
            self._inflows[stream] = Inflow(self._conversation, lambda: self._number, stream)
            return self._inflows[stream]

        self._terminal = terminal
        self.stdout = inflow(wire.OUT)
        self.stderr = NoStream() if terminal else inflow(wire.ERR)
        if stdin or terminal or channel:
            self._stdin = Outflow(self._conversation, lambda: self._number)
        if channel and not terminal and self._stdin is not None:
            self._carried = Carried(inflow(wire.BOTH), self._stdin, finished=lambda: None)
            self.channel = self._carried.end

    async def _begin(self, spawn: Spawn) -> None:
        try:
            # Shielded from nothing: if its caller goes, the order to end it follows the order to start it.
            pid, stage = await self._started
        except asyncio.CancelledError:
            self._signal(signals.SIGKILL)
            self.release()
            raise
        except SandboxLost:
            self.release()
            raise
        if stage:
            self._settle()
            self.release()
            raise _refusal(-pid, stage, spawn)
        self.pid = pid
        self.id = f"p{self._number}"

    def _exited(self, payload: bytes) -> None:
        code, killed_by, user_us, system_us, peak_kb, held = unpacked(wire.EXIT, payload)
        if held >= len(_HELD) or not 0 <= code <= 255 or not 0 <= killed_by <= 127:
            raise Violation("its twin told of an end that no process has")
        used_us = user_us + system_us
        by_limit = _HELD[held] or self._judge(code, killed_by, used_us)
        self.exit = Exit(
            code=None if killed_by else code,
            signal=killed_by or None,
            limit=by_limit or self._limit,
            cpu_s=used_us / 1e6,
            peak_bytes=peak_kb * 1024,
        )
        self._settle()

    def _judge(self, code: int, killed_by: int, used_us: int) -> LimitName | None:
        """Name the limit of the kernel's that ended it."""
        if self._cpu_s is not None and killed_by == signals.SIGKILL and used_us >= self._cpu_s * 1_000_000:
            return "cpu"
        # A shell ends as the command that it waited for did.
        return _LIMIT_SIGNALS.get(killed_by or code - 128)

    def _settle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()
        self._forget()

    def _forget(self) -> None:
        """Hear no more of it once it has ended and nobody wants its streams."""
        if self._released and self._ended.is_set():
            self._conversation.forget(self._number)

    def _signal(self, number: int, *, group: bool = True, doom: bool = False) -> None:
        self._conversation.say(wire.SIGNAL, self._number, wire.SIGNALLED.pack(number, group, doom))

    def _out_of_time(self) -> None:
        if self.exit is None:
            self._limit = "time"
            self._signal(signals.SIGTERM, doom=True)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_GRACE_S, self._signal, signals.SIGKILL)


def _refusal(code: int, stage: int, spawn: Spawn) -> Exception:
    return refusal(Report(REFUSED, 0, code, stage, 0, 0, 0, -1), spawn)


def _input_kind(*, stdin: bool, channel: bool, terminal: bool) -> int:
    if terminal:
        return wire.TERMINAL
    if channel:
        return wire.CHANNEL
    return wire.PIPE if stdin else wire.NOTHING
