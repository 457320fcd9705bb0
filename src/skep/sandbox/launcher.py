"""Start a sandbox's processes, and leave nothing behind when it ends."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import secrets
import select
import signal
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import cache

from skep.errors import InvalidRequest
from skep.sandbox.agent import JOIN, Agent, order
from skep.sandbox.binary import Bwrap, native
from skep.sandbox.cgroups import Group, Place
from skep.sandbox.leftovers import Record, records_folder
from skep.sandbox.limits import Limits

#: The launcher has 0-3 open; what it is sent gets the next numbers, in order.
_FIRST_FD = 4
#: What it takes with one order, `MAX_FDS` in agent.c.
_MOST_FDS = 32
_END_S = 2.0
_REST_S = 0.005


@dataclass(slots=True)
class Plan:
    """The arguments for bwrap, and the descriptors they speak of. Owns the descriptors until `close`."""

    bwrap: Bwrap
    owner: tuple[int, int] | None = None
    throwaway: tuple[str, int] | None = None
    arguments: list[str] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    #: Which descriptors (a bit each) root shows to bwrap at a path that the sandbox's own user can walk.
    shown: int = 0

    def __post_init__(self) -> None:
        self.fds += [os.open(self.bwrap.path, os.O_PATH | os.O_CLOEXEC), -1]
        # A user of its own may not be able to reach the libraries by path, so they are loaded by descriptor.
        if self.owner is not None:
            self.fds += [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self.bwrap.libraries[:1]]

    @property
    def preloads(self) -> bool:
        return self.owner is not None and bool(self.bwrap.libraries)

    def add(self, *arguments: str) -> None:
        self.arguments += arguments

    def number(self, fd: int) -> int:
        """Return the number a descriptor will have for bwrap."""
        if fd not in self.fds:
            self.fds.append(fd)
        return _FIRST_FD + self.fds.index(fd)

    def memory(self, data: bytes) -> int:
        fd = os.memfd_create("skep", os.MFD_CLOEXEC)
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def bind(self, fd: int, inside: str, *, read_only: bool = True) -> None:
        """Show an open file or folder inside, wherever it lies on the host."""
        number = self.number(fd)
        option = "--ro-bind" if read_only else "--bind"
        if self.owner is None:
            self.add(f"{option}-fd", str(number), inside)
        else:
            self.shown |= 1 << self.fds.index(fd)
            self.add(option, f"{records_folder()}/{number}", inside)

    def seccomp(self, program: bytes) -> None:
        if program:
            self.add("--seccomp", str(self.number(self.memory(program))))

    def seal(self) -> list[int]:
        """Return the descriptors in the launcher's order, the arguments among them."""
        if len(self.fds) > _MOST_FDS:
            raise InvalidRequest(
                f"a sandbox takes {_MOST_FDS} descriptors at its start, and this one needs {len(self.fds)}",
                hint="show fewer folders of the host, or keep them where everybody can walk",
            )
        self.fds[1] = self.memory(b"".join(os.fsencode(argument) + b"\0" for argument in self.arguments))
        return self.fds

    def close(self) -> None:
        for fd in self.fds:
            if fd >= 0:
                os.close(fd)
        self.fds.clear()


@dataclass(slots=True)
class Launcher:
    """The host's side of one sandbox: its process, control groups and the record of both."""

    id: str
    pid: int
    control: socket.socket
    group: Group
    record: Record
    complaints: int
    owner: tuple[int, int] | None = None

    @classmethod
    def start(cls) -> Launcher:
        """Start a launcher and send it into control groups of its own."""
        with _starting:
            launcher = cls._start()
            _held[launcher.id] = launcher
        try:
            _send_into(launcher.group, launcher.control)
        except BaseException:
            launcher.end_now()
            raise
        return launcher

    @classmethod
    def _start(cls) -> Launcher:
        sandbox_id = secrets.token_hex(8)
        record = Record.open(sandbox_id)
        group = Group.plan(Place.find(lambda trial: record.note(trial, None)))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        complaints = os.memfd_create("complaints", os.MFD_CLOEXEC)
        try:
            throwaway = (f"{tempfile.gettempdir()}/skep-workspace-{sandbox_id}", 0)
            record.note(group, throwaway)
            group = group.made()
            record.note(group, throwaway)
            pid = _spawn(theirs.fileno(), complaints)
        except BaseException:
            ours.close()
            os.close(complaints)
            record.settle(group, wait_s=0)
            raise
        finally:
            theirs.close()
        return cls(sandbox_id, pid, ours, group, record, complaints)

    async def go(self, agent: Agent, plan: Plan, limits: Limits) -> None:
        """Set the limits, then become bwrap as planned."""
        self.owner = plan.owner
        try:
            self.group.limit(limits)
            self.record.note(self.group, plan.throwaway)
            uid, gid = plan.owner or (0, 0)
            drops, preloads = int(plan.owner is not None), int(plan.preloads)
            await agent.launch(plan.shown, uid, gid, drops, preloads, fds=plan.seal())
        finally:
            plan.close()

    def died(self) -> bool:
        """Say whether the launcher is gone: somebody may have killed it while it waited."""
        peer = select.poll()
        peer.register(self.control, 0)
        return any(events & select.POLLHUP for _, events in peer.poll(0))

    def complaint(self) -> str:
        """Return what the launcher or bwrap said on standard error."""
        said = os.pread(self.complaints, 4096, 0)
        return said.decode(errors="replace").strip()

    async def end(self) -> None:
        """Wait until everything is gone, by force if need be, and remove what the sandbox held on the host."""
        await asyncio.to_thread(self.end_now)

    def end_now(self) -> None:
        self.control.close()
        if not _reaped(self.pid, _END_S):
            self.group.kill()
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        del _held[self.id]
        os.close(self.complaints)
        self.record.settle(self.group, wait_s=_END_S)

    def let_go(self) -> None:
        """Close what this process holds of a sandbox that another one runs."""
        self.control.close()
        os.close(self.complaints)
        self.record.close()


class Spare:
    """One launcher kept ready: joining control groups takes the kernel up to 20 ms, which nobody then waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launcher: Launcher | None = None
        self._thread: threading.Thread | None = None

    def take(self) -> Launcher:
        """Return the spare launcher, or a new one."""
        with self._lock:
            launcher, self._launcher = self._launcher, None
        if launcher is not None and launcher.died():
            launcher.end_now()
            launcher = None
        return launcher or Launcher.start()

    def refill(self) -> None:
        """Make the next spare in the background."""
        with self._lock:
            if self._launcher is None and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._make, name="skep-spare", daemon=True)
                self._thread.start()

    def drop(self) -> None:
        """End the spare launcher, if there is one."""
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.end_now()

    def forget(self) -> None:
        """Have no spare, and none on its way."""
        self._lock = threading.Lock()
        self._launcher = self._thread = None

    def _make(self) -> None:
        # A process that joins a control group holds up every fork on the machine. The sandbox that was just made
        # gets to run its first command before.
        time.sleep(_REST_S)
        launcher = Launcher.start()
        with self._lock:
            self._launcher = launcher


@cache
def spare() -> Spare:
    """Return this process's spare launcher; it goes with the process."""
    kept = Spare()
    atexit.register(kept.drop)
    os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_let_all_go)
    return kept


#: The launchers of this process; one that is being started is added before anybody can fork.
_held: dict[str, Launcher] = {}
_starting = threading.Lock()


def _let_all_go() -> None:
    """Keep nothing of the parent's sandboxes in a forked child: by its copies they would outlive the parent."""
    _starting.release()
    for launcher in _held.values():
        launcher.let_go()
    _held.clear()
    spare().forget()


def _spawn(control: int, complaints: int) -> int:
    nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    actions = [
        (os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate((nothing, nothing, complaints, control))
    ]
    try:
        return os.posix_spawn(
            native("skep-agent"), ["skep-agent", "launch", str(records_folder())], {}, file_actions=actions, setsid=True
        )
    finally:
        os.close(nothing)


def _send_into(group: Group, control: socket.socket) -> None:
    doors = group.doors()
    try:
        if doors:
            socket.send_fds(control, [order(JOIN)], doors)
    finally:
        for door in doors:
            os.close(door)


def _reaped(pid: int, wait_s: float) -> bool:
    """Wait for a child of ours to end, without the event loop."""
    # Where the program ignores SIGCHLD, the kernel reaps children by itself.
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        pidfd = os.pidfd_open(pid)
        try:
            ended = select.poll()  # unlike select(2) it takes descriptors past 1023
            ended.register(pidfd, select.POLLIN)
            ready = ended.poll(wait_s * 1000)
        finally:
            os.close(pidfd)
        if not ready:
            return False
        os.waitpid(pid, 0)
    return True
