"""The host's side of one gVisor sandbox: its processes, its folder, its control groups and the record of them.

`runsc run` has two children: the one that is gVisor's kernel, and the one that opens files for it. The kernel of the
host ends both with it, and it with the controller; what it leaves are files in the sandbox's own folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import signal
import sys
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from skep.sandbox.cgroups import Group, Place
from skep.sandbox.claim import Owner
from skep.sandbox.gvisor.bundle import Bind
from skep.sandbox.leftovers import Record
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.link import Housing, PipeLink
from skep.sandbox.pipes import make_pipe

_LAUNCH = Path(__file__).with_name("launch.py")
#: The launcher reads its orders at 3; the doors of control groups follow.
_ORDERS, _FIRST_DOOR = 3, 4
#: What gVisor takes besides: its own processes, and some 13 threads of the host for each process inside, which it keeps
#: for the next. Without them it crashes, so how many processes there may be is for its own kernel and the twin to hold.
_KERNEL_BYTES, _KERNEL_THREADS, _THREADS_EACH = 192 * MIB, 256, 16
#: How long runsc may take to leave by itself, and to go when it is made to.
_LEAVE_S, _END_S = 1.0, 2.0


@dataclass(slots=True)
class Folder:
    """What a sandbox holds on the host before and after it runs; `end` removes it all."""

    id: str
    path: Path
    group: Group
    record: Record

    @classmethod
    def make(cls, *, grouped: bool = True) -> Folder:
        """Make the folder and, unless somebody else does, control groups; listed in the record before they are."""
        sandbox_id = secrets.token_hex(8)
        path = Path(tempfile.gettempdir()) / f"skep-gvisor-{sandbox_id}"
        record = Record.open(sandbox_id)
        place = Place.find(lambda trial: record.note(trial, None)) if grouped else Place("none", {})
        group = Group.plan(place)
        try:
            record.note(group, (str(path), 0))
            path.mkdir(mode=0o700)
            record.note(group, (str(path), path.stat().st_ino))
            group = group.made()
            record.note(group, (str(path), path.stat().st_ino))
        except BaseException:
            record.settle(group, wait_s=0)
            raise
        _held()[sandbox_id] = [record.fd]
        return cls(sandbox_id, path, group, record)

    def remove(self) -> None:
        del _held()[self.id]
        self.record.settle(self.group, wait_s=_END_S)


@dataclass(frozen=True, slots=True)
class Orders:
    """What `launch` is told."""

    argv: tuple[str, ...]
    owner: Owner
    #: The sandbox's folder, and where runsc finds it when Skep is root.
    folder: tuple[str, str]
    binds: tuple[Bind, ...] = ()

    def text(self, doors: int) -> bytes:
        told = {
            "argv": self.argv,
            "owner": self.owner,
            "folder": self.folder,
            "binds": self.binds,
            "parent": os.getpid(),
            "doors": [_FIRST_DOOR + number for number in range(doors)],
        }
        return json.dumps(told).encode()


@dataclass(slots=True)
class House(Housing):
    """A gVisor sandbox that runs: the process of runsc, and the link to the twin in it."""

    folder: Folder
    pid: int
    pidfd: int
    link: PipeLink
    complaints: int
    #: The processes that it cannot do without, watched once it serves.
    watched: list[int] = field(default_factory=list)
    ended: bool = False
    said: str = ""

    @property
    def id(self) -> str:  # type: ignore[override]
        return self.folder.id

    @classmethod
    def start(cls, folder: Folder, orders: Orders, limits: Limits) -> House:
        """Start runsc within limits."""
        folder.group.limit(with_kernel(limits))
        their_input, our_output = make_pipe(orders.owner)
        our_input, their_output = make_pipe(orders.owner)
        complaints = os.memfd_create("complaints", os.MFD_CLOEXEC)
        try:
            pid = _spawn(orders, folder.group, (their_input, their_output, complaints))
            pidfd = os.pidfd_open(pid)
        except BaseException:
            for fd in (our_output, our_input, complaints):
                os.close(fd)
            raise
        finally:
            os.close(their_input)
            os.close(their_output)
        _held()[folder.id] += [our_output, our_input, pidfd, complaints]
        return cls(folder, pid, pidfd, PipeLink(our_input, our_output), complaints)

    def watch(self) -> None:
        """End the sandbox as soon as one of its processes is gone: with one alone it would answer no more, or wrong."""
        loop = asyncio.get_running_loop()
        for pid in self.children():
            with contextlib.suppress(ProcessLookupError):
                self.watched.append(os.pidfd_open(pid))
                loop.add_reader(self.watched[-1], self._fall)

    def children(self) -> list[int]:
        """Return the processes that runsc has started, by whichever of its threads."""
        found = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end, or runsc itself
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return found

    def _fall(self) -> None:
        self._unwatch()
        self._kill()

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for pidfd in self.watched:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self.watched.clear()

    def complaint(self) -> str:
        """Return what the launcher or runsc said on standard error."""
        if not self.ended:
            self.said = os.pread(self.complaints, 4096, 0).decode(errors="replace").strip()
        return self.said

    async def alive(self) -> bool:
        return not self.ended and not _over(self.pidfd, 0)

    async def end(self) -> None:
        if not self.ended:
            self.complaint()
            self.ended = True
            self._unwatch()
            await self.link.close()
            await asyncio.shield(asyncio.to_thread(self._end))

    def _end(self) -> None:
        if not _over(self.pidfd, _LEAVE_S):
            self._kill()
            if not _over(self.pidfd, _END_S):
                self.folder.group.kill()
        with contextlib.suppress(ChildProcessError):  # where the program ignores SIGCHLD, the kernel reaps by itself
            os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        os.close(self.complaints)
        self.folder.remove()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


@cache
def _held() -> dict[str, list[int]]:
    """Return the descriptors of this process's sandboxes, which a forked child lets go of when it is born."""
    held: dict[str, list[int]] = {}

    def let_go() -> None:
        # By bare calls: the parent's event loop must not be told that it has lost them.
        for fd in (fd for fds in held.values() for fd in fds):
            os.close(fd)
        held.clear()

    os.register_at_fork(after_in_child=let_go)
    return held


def with_kernel(limits: Limits) -> Limits:
    """Leave room for gVisor itself: the host's limits end the whole sandbox, the twin's one command before that."""
    return replace(
        limits,
        memory_bytes=limits.memory_bytes + _KERNEL_BYTES,
        processes=limits.processes * _THREADS_EACH + _KERNEL_THREADS,
    )


def _spawn(orders: Orders, group: Group, streams: tuple[int, int, int]) -> int:
    with contextlib.ExitStack() as opened:
        doors = group.doors()
        for door in doors:
            opened.callback(os.close, door)
        told = os.memfd_create("orders", os.MFD_CLOEXEC)
        opened.callback(os.close, told)
        os.write(told, orders.text(len(doors)))
        os.lseek(told, 0, os.SEEK_SET)
        argv = [sys.executable, "-I", "-S", str(_LAUNCH)]
        return os.posix_spawn(sys.executable, argv, {}, file_actions=_actions((*streams, told, *doors)), setsid=True)


def _actions(fds: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Give descriptors the numbers from 0 on. They are first moved out of each other's way."""
    aside = max((*fds, len(fds))) + 1
    moves = [(os.POSIX_SPAWN_DUP2, fd, aside + number) for number, fd in enumerate(fds)]
    moves += [(os.POSIX_SPAWN_DUP2, aside + number, number) for number in range(len(fds))]
    return [*moves, *((os.POSIX_SPAWN_CLOSE, aside + number) for number in range(len(fds)))]


def _over(pidfd: int, wait_s: float) -> bool:
    ended = select.poll()  # unlike select(2) it takes descriptors past 1023
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(wait_s * 1000))
