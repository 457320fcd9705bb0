"""Who is in a sandbox on this machine's kernel: its processes, seen and ended from outside, through its own /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from skep.sandbox.mark import is_marked, until_none


@contextmanager
def processes(root_fd: int) -> Iterator[tuple[int, list[int]]]:
    """Open /proc as it is inside, with the processes in it other than the agent; nothing of a dead sandbox's."""
    try:
        proc = os.open("proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root_fd)
    except OSError:
        yield -1, []
        return
    try:
        yield proc, [int(name) for name in os.listdir(proc) if name.isdigit() and name != "1"]
    finally:
        os.close(proc)


def has_processes(root_fd: int) -> bool:
    """Say whether any process but the agent is in the sandbox with this root."""
    with processes(root_fd) as (_, pids):
        return bool(pids)


def end_marked(root_fd: int, run: str, *, within_s: float) -> bool:
    """Kill a run's processes, those too that they start meanwhile; say whether none is left."""

    def end_found() -> bool:
        with processes(root_fd) as (proc, pids):
            return bool([pid for pid in pids if _end_if_marked(proc, pid, run)])

    return until_none(end_found, within_s=within_s)


def _end_if_marked(proc: int, pid: int, run: str) -> bool:
    """Kill one process if it is the run's; say whether it was there and was."""
    try:
        # What is read and what is killed is one process: its folder is never that of a later one with its number.
        folder = os.open(str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return False
    try:
        if not is_marked("environ", run, dir_fd=folder):
            return False
        with contextlib.suppress(OSError):  # it has gone, or is not this user's
            signal.pidfd_send_signal(folder, signal.SIGKILL)
        return True
    finally:
        os.close(folder)
