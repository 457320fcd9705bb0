"""The trials on a kernel with version 2 and no systemd: groups made by hand, some handed to an ordinary user."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

from tests.sandbox.guest import trials
from tests.sandbox.guest.report import TRIAL_S, USER, say, say_printed

# Imported before the trials are forked off: an emulated processor takes seconds for it.
from skep.sandbox import bubblewrap, leftovers  # noqa: F401

ROOT = Path("/sys/fs/cgroup")
ALL = "+memory +pids +cpu"
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, CLONE_NEWNS = 1, 32, 4096, 16384, 1 << 18, 0x20000
FORK = multiprocessing.get_context("fork")


def main() -> None:
    say("kernel", {"release": os.uname().release, "controllers": (ROOT / "cgroup.controllers").read_text().split()})
    (ROOT / "cgroup.subtree_control").write_text(ALL)
    run("limits", "limits", enter=member(delegated("limits")))
    run("refused", "refused", enter=member(delegated("refused")))
    run("sharing", "sharing", enter=member(delegated("sharing")))
    killed()
    run("undelegated", "bomb", enter=member(made("undelegated")))
    crowded()
    run("no cpu", "bomb", enter=member(delegated("no-cpu", controllers="+memory +pids")))
    run("no memory", "where", enter=member(delegated("no-memory", controllers="+cpu +pids")))
    run("root of all", "bomb", enter=lambda: None)
    run("read-only", "where", enter=read_only)


def made(name: str) -> Path:
    group = ROOT / name
    group.mkdir()
    return group


def delegated(name: str, *, controllers: str = ALL) -> Path:
    """Make a group as an administrator delegates one: the folder and three files are the user's."""
    outer = made(f"outer-{name}")
    (outer / "cgroup.subtree_control").write_text(controllers)
    group = outer / name
    group.mkdir()
    for file in ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
        os.chown(group / file, USER, USER)
    return group


def member(group: Path) -> Callable[[], None]:
    """Return what makes a process an ordinary user's, in a group."""

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)

    return enter


def read_only() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    assert libc.mount(b"none", b"/sys/fs/cgroup", None, MS_REMOUNT | MS_BIND | MS_RDONLY, None) == 0


def run(name: str, trial: str, *, enter: Callable[[], None]) -> None:
    with tempfile.TemporaryFile("w+") as output:
        process = started(trial, enter, output)
        process.join(TRIAL_S)
        process.kill()
        process.join()
        say_printed(name, process.exitcode, contents(output))


def started(trial: str, enter: Callable[[], None], output: IO[str]) -> BaseProcess:
    process = FORK.Process(target=child, args=(trial, enter, output.fileno()))
    process.start()
    return process


def child(trial: str, enter: Callable[[], None], output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    enter()
    print(json.dumps(trials.made(trial)), flush=True)


def contents(output: IO[str]) -> str:
    output.seek(0)
    return output.read()


def killed() -> None:
    """Kill a controller, then let another one in the same delegated group clean up."""
    group = delegated("killed")
    with tempfile.TemporaryFile("w+") as output:
        victim = started("hold", member(group), output)
        until(lambda: contents(output).endswith("\n"))
        folder = Path(contents(output).strip())
    inside = len(folder.joinpath("cgroup.procs").read_text().split())
    victim.kill()
    victim.join()
    gone = until(lambda: not folder.joinpath("cgroup.procs").read_text())
    say("killed", {"inside": inside, "gone": gone, "folder": folder.exists()})
    run("swept", "sweep", enter=member(group / "skep-controller"))
    say("after the sweep", {"folder": folder.exists()})


def until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TRIAL_S
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def crowded() -> None:
    """Let somebody else sit in the delegated group as well."""
    group = delegated("crowded")
    other = os.posix_spawn("/usr/bin/sleep", ["sleep", "1000"], {})
    (group / "cgroup.procs").write_text(str(other))
    run("crowded", "where", enter=member(group))
    os.kill(other, 9)
    os.waitpid(other, 0)


if __name__ == "__main__":
    main()
