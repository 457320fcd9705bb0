"""The controller's side of the native agent: orders go in, reports come out.

What the agent says is treated as hostile although the agent is ours: records have a fixed size, unknown ones end
the conversation, and no number from it is used as more than a label.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal as signals
import socket
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache

from skep.errors import Defect, InvalidRequest, LimitReached, SandboxLost

_ORDER = struct.Struct("=IIiiii")
_REPORT = struct.Struct("=IIiiQQQ")
_HEADER = struct.Struct("=IIII")
_LIMIT = struct.Struct("=IIQQ")
_DESCRIPTOR = struct.Struct("=i")

JOIN, LAUNCH, SPAWN, SIGNAL, PAUSE, RESUME, CONNECT, NETWORK, OPEN, ADMIT, HOLD, RELEASE, BEGIN, END = range(1, 15)
READY, STARTED, REFUSED, EXITED, DONE, LEFT = range(1, 7)
AT_PAYLOAD, AT_FORK, AT_TERMINAL, AT_LIMIT, AT_CWD, AT_EXEC = range(1, 7)


@dataclass(frozen=True, slots=True)
class Report:
    """One record from the agent; `fd` is a descriptor that came along, -1 if none."""

    kind: int
    id: int
    a: int
    b: int
    user_us: int
    system_us: int
    peak_kb: int
    fd: int

    @classmethod
    def read(cls, data: bytes, fds: Sequence[int]) -> Report:
        kind, order_id, a, b, user_us, system_us, peak_kb = _REPORT.unpack(data)
        return cls(kind, order_id, a, b, user_us, system_us, peak_kb, fds[0] if fds else -1)

    def without_fd(self) -> Report:
        """Close a descriptor that nobody asked for."""
        if self.fd < 0:
            return self
        os.close(self.fd)
        return replace(self, fd=-1)


@dataclass(frozen=True, slots=True)
class Spawn:
    """What the agent needs to know to start a command."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    limits: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def payload(self) -> bytes:
        for name in self.env:
            if not name or "=" in name:
                raise InvalidRequest(f"{name!r} cannot name an environment variable", hint="use a name without `=`")
        texts = [self.cwd, *self.argv, *(f"{key}={value}" for key, value in self.env.items())]
        joined = "\0".join(texts) + "\0"
        try:
            encoded = os.fsencode(joined)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"a command, its folder or its environment is not valid text: {error.reason}", hint="use UTF-8 text"
            ) from error
        if joined.count("\0") != len(texts):
            raise InvalidRequest(
                "a command, its folder or its environment contains a NUL character",
                hint="remove the character",
            )
        head = _HEADER.pack(len(self.argv), len(self.env), len(self.limits), 0)
        limits = b"".join(_LIMIT.pack(kind, 0, soft, hard) for kind, (soft, hard) in self.limits.items())
        return head + limits + encoded


def order(kind: int, order_id: int = 0, *arguments: int) -> bytes:
    """Return one order as the agent reads it."""
    return _ORDER.pack(kind, order_id, *(*arguments, 0, 0, 0, 0)[:4])


#: Called with the report of a process's end, or with None if the agent went first.
Ended = Callable[[Report | None], None]


class Agent:
    """A conversation with one agent over a socket of records."""

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._next_id = 1
        self._answers: dict[int, asyncio.Future[Report]] = {0: self._loop.create_future()}
        self._exits: dict[int, Ended] = {}
        self._guests: dict[int, Callable[[], None]] = {}
        self._sending = asyncio.Lock()
        #: Set once the agent is gone, by whatever means.
        self.lost = asyncio.Event()
        #: Set while the agent serves nobody else.
        self.alone = asyncio.Event()
        self.alone.set()
        self._loop.add_reader(control.fileno(), self._receive)

    async def ready(self) -> int:
        """Wait until the agent serves; return a descriptor of the sandbox's root folder."""
        return (await self._answers[0]).fd

    async def ask(self, kind: int, *arguments: int, fds: Sequence[int] = ()) -> Report:
        """Send an order and return the answer to it."""
        return await self._ask(self._new_id(), kind, arguments, fds)

    async def _ask(self, order_id: int, kind: int, arguments: Sequence[int], fds: Sequence[int]) -> Report:
        answer: asyncio.Future[Report] = self._loop.create_future()
        self._answers[order_id] = answer
        try:
            await self._send(kind, order_id, arguments, fds)
            report = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().without_fd()  # it came just as its asker went
            raise
        finally:
            self._answers.pop(order_id, None)
        return report if kind in (CONNECT, NETWORK) else report.without_fd()

    async def launch(self, shown: int, *arguments: int, fds: Sequence[int]) -> None:
        """Tell a launcher to become bwrap. The answer is `ready`, or the end of the conversation."""
        await self._send(LAUNCH, shown, arguments, fds)

    async def spawn(
        self,
        spawn: Spawn,
        on_exit: Ended,
        *,
        fds: Sequence[int] = (),
        terminal: tuple[int, int] | None = None,
    ) -> Report:
        """Start a command and return the report of its start; `on_exit` is called once, when it has ended."""
        payload = spawn.payload()
        order_id = self._new_id()
        answer: asyncio.Future[Report] = self._loop.create_future()
        self._answers[order_id] = answer
        self._exits[order_id] = on_exit
        rows, columns = terminal or (0, 0)
        try:
            with _in_memory(payload) as memory:
                await self._send(SPAWN, order_id, (int(terminal is not None), rows, columns), (memory, *fds))
        except BaseException:
            self._forget(order_id)
            raise
        try:
            # Shielded: the command starts whether or not somebody still waits to hear of it.
            report = await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(lambda started: self._abandon(order_id, started))
            raise
        except SandboxLost:
            self._forget(order_id)
            raise
        self._answers.pop(order_id, None)
        if report.kind == REFUSED:
            self._exits.pop(order_id, None)
            raise refusal(report.without_fd(), spawn)
        if terminal is None:
            return report.without_fd()
        if report.fd < 0:
            await self.signal(order_id, signals.SIGKILL)
            raise LimitReached(
                "a terminal's descriptor did not arrive", hint="raise this process's limit of open files"
            )
        return report

    async def admit(self, control: socket.socket, on_left: Callable[[], None]) -> int:
        """Have the agent serve a guest too, on this end of a pair; return the name by which it is known from now on.

        `on_left` is called once, when the guest has gone.
        """
        name = self._new_id()
        self._guests[name] = on_left
        self.alone.clear()
        try:
            report = await self._ask(name, ADMIT, (), (control.fileno(),))
        except BaseException:
            self._see_off(name)
            raise
        if report.kind == REFUSED:
            self._see_off(name)
            raise LimitReached(
                f"the sandbox can take in no other process: {os.strerror(report.a)}",
                hint="end some of the processes that use this workspace",
            )
        return name

    @property
    def guests(self) -> int:
        """How many other processes the agent serves."""
        return len(self._guests)

    def end_for_guest(self, name: int, cause: int) -> None:
        """End all that a guest has started; each end is told to the guest with this number for its cause."""
        with contextlib.suppress(OSError):  # as with `_abandon`
            self._control.send(order(SIGNAL, name, signals.SIGKILL, 0, cause, 1))

    def _see_off(self, name: int) -> None:
        if (on_left := self._guests.pop(name, None)) is not None:
            on_left()
        if not self._guests:
            self.alone.set()

    def _forget(self, order_id: int) -> None:
        self._answers.pop(order_id, None)
        self._exits.pop(order_id, None)

    def _abandon(self, order_id: int, started: asyncio.Future[Report]) -> None:
        """End a command whose caller was cancelled while it started."""
        self._forget(order_id)
        if started.cancelled() or started.exception() is not None:
            return
        if started.result().fd >= 0:
            os.close(started.result().fd)
        # One small record: where there is no room for it the sandbox has worse problems.
        with contextlib.suppress(OSError):
            self._control.send(order(SIGNAL, order_id, signals.SIGKILL))

    async def signal(self, order_id: int, number: int, *, leader_only: bool = False, doom: bool = False) -> None:
        """Send a signal to a command's group; with `doom` nothing of the group outlives the command itself."""
        await self._send(SIGNAL, order_id, (number, int(leader_only), 0, int(doom)), ())

    async def signal_inside(self, pid: int, number: int) -> None:
        """Send a signal to a process by its number inside, or to all of them with -1."""
        await self._send(SIGNAL, 0, (number, 0, pid), ())

    def close(self, why: str = "it was stopped") -> None:
        """End the conversation; the agent and all it started die of it."""
        self._lose(why)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    async def _send(self, kind: int, order_id: int, arguments: Sequence[int], fds: Sequence[int]) -> None:
        record = order(kind, order_id, *arguments)
        async with self._sending:
            while not self.lost.is_set():
                try:
                    socket.send_fds(self._control, [record], list(fds))
                except BlockingIOError:
                    await self._writable()
                except OSError:
                    break
                else:
                    return
        raise SandboxLost("the sandbox is gone", hint="resolve the session or create a new sandbox")

    async def _writable(self) -> None:
        room = asyncio.Event()
        self._loop.add_writer(self._control.fileno(), room.set)
        try:
            await room.wait()
        finally:
            if not self.lost.is_set():
                self._loop.remove_writer(self._control.fileno())

    def _receive(self) -> None:
        for _ in range(64):  # leave the loop to others now and then
            try:
                data, fds, flags = _received(self._control)
            except BlockingIOError:
                return
            except OSError:
                data, fds, flags = b"", [], 0
            if len(data) != _REPORT.size or flags & socket.MSG_TRUNC:
                for fd in fds:
                    os.close(fd)
                self._lose("its control socket closed")
                return
            self._take(Report.read(data, fds))

    def _take(self, report: Report) -> None:
        answer = self._answers.get(report.id)
        waiting = answer is not None and not answer.done()
        if not _fits(report, waiting=waiting, spawning=report.id in self._exits):
            report.without_fd()
            self._lose("its agent said something that it never says")
        elif report.kind == EXITED:
            report.without_fd()
            if (on_exit := self._exits.pop(report.id, None)) is not None:
                on_exit(report)
        elif report.kind == LEFT:
            report.without_fd()
            self._see_off(report.id)
        elif answer is not None and waiting:
            answer.set_result(report)
        else:
            report.without_fd()  # nobody waits for it any more

    def _lose(self, why: str) -> None:
        if self.lost.is_set():
            return
        self.lost.set()
        self._loop.remove_reader(self._control.fileno())
        with contextlib.suppress(OSError):
            self._loop.remove_writer(self._control.fileno())
        self._control.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(SandboxLost(f"the sandbox is gone: {why}"))
                answer.exception()  # nobody may be waiting for this one
        for on_exit in self._exits.values():
            on_exit(None)
        self._exits.clear()
        for name in list(self._guests):
            self._see_off(name)


def _received(control: socket.socket) -> tuple[bytes, list[int], int]:
    """Receive one record with at most one descriptor, which no child inherits: `socket.recv_fds` drops its flags."""
    room = socket.CMSG_LEN(_DESCRIPTOR.size)
    data, attached, flags, _ = control.recvmsg(_REPORT.size + 1, room, socket.MSG_CMSG_CLOEXEC)
    fds = [
        fd
        for level, kind, numbers in attached
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _DESCRIPTOR.iter_unpack(numbers)
    ]
    return data, fds, flags


def _fits(report: Report, *, waiting: bool, spawning: bool) -> bool:
    """Say whether a report can be meant: of a known kind, and an answer to what was asked."""
    match report.kind:
        case kind if kind == EXITED:
            return not (waiting and spawning)  # nothing ends before it has started
        case kind if not waiting:
            return kind in (READY, STARTED, REFUSED, DONE, LEFT)
        case kind if report.id == 0:
            return kind == READY
        case kind if spawning:
            return kind in (STARTED, REFUSED)
        case kind:
            return kind in (DONE, REFUSED)


@contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("spawn", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)  # or the agent would not read it
        yield fd
    finally:
        os.close(fd)


def refusal(report: Report, spawn: Spawn) -> Exception:
    """Put into words why a command could not be started."""
    reason = os.strerror(report.a)
    match report.b:
        case stage if stage == AT_EXEC and report.a == errno.E2BIG:
            return InvalidRequest(
                f"cannot run {spawn.argv[0]!r}: the command with its environment is too long",
                hint="write the long part to a file first; one argument has room for 128 KiB",
            )
        case stage if stage == AT_EXEC:
            return InvalidRequest(
                f"cannot run {spawn.argv[0]!r}: {reason}",
                hint="check the name, or install the program in the workspace",
            )
        case stage if stage == AT_CWD:
            return InvalidRequest(f"cannot enter {spawn.cwd!r}: {reason}", hint="create the folder first")
        case stage if stage == AT_FORK:
            return LimitReached(
                f"the sandbox cannot start another process: {reason}",
                hint="end what runs in it with `kill_all`, or raise the limit `processes`",
            )
        case stage if stage == AT_LIMIT:
            return InvalidRequest(
                f"a limit of the command cannot be set: {reason}", hint="ask for no more than the sandbox has"
            )
        case stage if stage == AT_PAYLOAD:
            return InvalidRequest(
                f"cannot run {spawn.argv[0]!r}: the command with its environment is too long",
                hint="write the long part to a file first; 64 MiB is the most that is handed over",
            )
        case _:
            return Defect(f"the agent could not start {spawn.argv[0]!r} (stage {report.b}): {reason}")


@cache
def closed_in_children() -> weakref.WeakSet[socket.socket]:
    """Return the connections that a forked child closes: by its copies, commands would outlive its parent."""
    controls: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def let_go() -> None:
        for control in controls:
            control.close()

    os.register_at_fork(after_in_child=let_go)
    return controls
