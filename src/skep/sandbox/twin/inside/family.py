"""Everything that descends from the twin, and nothing else, whatever else runs here."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

from skep.sandbox.mark import is_marked, until_none

#: How long somebody may go on forking before what is known of is dealt with as it is.
_SETTLE_S = 2.0
_STOPPED, _GONE = "tT", "ZX"


class Kin(NamedTuple):
    """A process, told from a later one with the same number by when it began."""

    pid: int
    parent: int
    state: str
    began: int


class Family:
    """The descendants of this process. With `alone` it is the first process of a world of its own, and they are all."""

    def __init__(self, *, alone: bool) -> None:
        self._all = alone and os.getpid() == 1

    def living(self) -> list[Kin]:
        """Return the descendants that are no zombies."""
        table = {kin.pid: kin for kin in _processes()}
        me = os.getpid()
        ours = {me: True}
        for pid in table:
            _belongs(pid, table, ours)
        return [kin for kin in table.values() if ours[kin.pid] and kin.pid != me and kin.state not in _GONE]

    def halt(self, within_s: float = _SETTLE_S) -> None:
        """Stop them all, those too that are born meanwhile."""
        deadline = time.monotonic() + within_s
        while (moving := [kin for kin in self.living() if kin.state not in _STOPPED]) and time.monotonic() < deadline:
            self._signal(moving, signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(self.living(), signal.SIGCONT)

    def end(self) -> None:
        """Kill them all. Who is stopped forks no more, so it is done in that order."""
        deadline = time.monotonic() + _SETTLE_S
        while self.living() and time.monotonic() < deadline:
            if not self._all:
                self.halt(_SETTLE_S / 4)
            self._signal(self.living(), signal.SIGKILL)

    def end_marked(self, run: str, within_s: float) -> bool:
        """Kill a run's processes, those too that they start meanwhile; say whether none is left."""

        def end_found() -> bool:
            found = [kin for kin in self.living() if is_marked(f"/proc/{kin.pid}/environ", run)]
            for one in found:
                with contextlib.suppress(OSError):
                    send(one, signal.SIGKILL)
            return bool(found)

        return until_none(end_found, within_s=within_s)

    def _signal(self, kin: list[Kin], number: int) -> None:
        if self._all:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)
            return
        for one in kin:
            with contextlib.suppress(OSError):
                send(one, number)


def send(kin: Kin, number: int) -> None:
    """Signal a process, unless its number is another's by now."""
    try:
        fd = os.pidfd_open(kin.pid)
    except (AttributeError, OSError):
        found = _read(kin.pid)
        if found is not None and found.began == kin.began:
            os.kill(kin.pid, number)
        return
    try:
        found = _read(kin.pid)
        if found is not None and found.began == kin.began:
            signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def memory_of(pid: int) -> int:
    """Return the memory that is a process's alone, in bytes."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _belongs(pid: int, table: dict[int, Kin], ours: dict[int, bool]) -> bool:
    """Say whether a process descends from this one, going up until that is known."""
    way = []
    while pid not in ours:
        way.append(pid)
        ours[pid] = False  # until it is known; a table read in pieces can hold a circle
        pid = table[pid].parent if pid in table else 0
        ours.setdefault(0, False)
    answer = ours[pid]
    for one in way:
        ours[one] = answer
    return answer


def _processes() -> Iterator[Kin]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            found = _read(int(name))
            if found is not None:
                yield found


def _read(pid: int) -> Kin | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name in brackets may hold anything, brackets too.
    fields = text[text.rindex(b")") + 2 :].split()
    return Kin(pid, int(fields[1]), fields[0].decode(), int(fields[19]))
