"""Control groups: the kernel's own limits on memory, processes and processor time.

Which way is open differs from host to host and is found by trying: version 2 with a delegated subtree, a scope from
the user's systemd, version 1 where its folders are writable, or nothing at all. In the last case rlimits and the
watcher (`watcher.py`) stand in, and `skep doctor` says what is then weaker.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from skep.sandbox.limits import Limits

Way = Literal["v2", "v1", "none"]
_V1_CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Group:
    """The control group of one sandbox: one folder in version 2, one per controller in version 1.

    Each folder is kept with its inode number, so that a later folder of the same name is never taken for it.
    """

    way: Way
    folders: Mapping[str, tuple[str, int]]

    @classmethod
    def make(cls) -> Group:
        """Make an empty group, or one with no folders where control groups cannot be used."""
        way, parents = places()
        name = f"skep-{secrets.token_hex(8)}"
        folders: dict[str, tuple[str, int]] = {}
        for controller, parent in parents.items():
            folder = Path(parent, name)
            folder.mkdir()
            folders[controller] = (str(folder), folder.stat().st_ino)
        return cls(way, folders)

    def limit(self, limits: Limits) -> None:
        """Write the limits. Called before anything of the sandbox runs."""
        for controller, name, value in _settings(self.way, limits):
            _write(self._file(controller, name), value)

    def doors(self) -> list[int]:
        """Open the files through which a process joins; the caller closes them."""
        return [os.open(f"{folder}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder, _ in self.folders.values()]

    def memory_kills(self) -> int:
        """Return how often the kernel has killed for memory in this group."""
        match self.way:
            case "v2":
                return _count(self._file("", "memory.events"), "oom_kill")
            case "v1":
                return _count(self._file("memory", "memory.oom_control"), "oom_kill")
            case "none":
                return 0

    def refused_forks(self) -> int:
        """Return how often a process could not be started because of the limit."""
        match self.way:
            case "v2":
                return _count(self._file("", "pids.events"), "max")
            case "v1":
                return _count(self._file("pids", "pids.events"), "max")
            case "none":
                return 0

    def remove(self, *, wait_s: float = 0.0) -> bool:
        """Remove the group if it is still the one that was made; say whether nothing of it is left."""
        deadline = time.monotonic() + wait_s
        left = list(self.folders.values())
        while left := [(folder, inode) for folder, inode in left if not _remove(folder, inode)]:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        return not left

    def kill(self) -> None:
        """End whatever is left in the group."""
        for folder, inode in self.folders.values():
            if not _is(folder, inode):
                continue
            for pid in Path(folder, "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)

    def _file(self, controller: str, name: str) -> str:
        return f"{self.folders[controller][0]}/{name}"


@cache
def places() -> tuple[Way, dict[str, str]]:
    """Find where this process may make groups: a folder per controller, and which version it is."""
    if folder := _delegated_v2():
        return "v2", {"": folder}
    try:
        parents = {controller: _v1_folder(controller) for controller in _V1_CONTROLLERS}
    except (KeyError, OSError):
        return "none", {}
    if all(os.access(parent, os.W_OK) for parent in parents.values()):
        return "v1", parents
    return "none", {}


def _settings(way: Way, limits: Limits) -> Iterator[tuple[str, str, str]]:
    quota = str(max(1000, int(limits.cpus * _CPU_PERIOD_US)))
    match way:
        case "v2":
            yield "", "memory.max", str(limits.memory_bytes)
            yield "", "memory.swap.max", "0"
            yield "", "pids.max", str(limits.processes)
            yield "", "cpu.max", f"{quota} {_CPU_PERIOD_US}"
        case "v1":
            yield "memory", "memory.limit_in_bytes", str(limits.memory_bytes)
            yield "pids", "pids.max", str(limits.processes)
            yield "cpu", "cpu.cfs_period_us", str(_CPU_PERIOD_US)
            yield "cpu", "cpu.cfs_quota_us", quota
        case "none":
            pass


def _own_path(controller: str) -> str:
    """Return this process's group, from /proc/self/cgroup, for a controller ('' is version 2)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    raise KeyError(controller)


def _v1_folder(controller: str) -> str:
    mounted = _ROOT / controller
    own = mounted / _own_path(controller).lstrip("/")
    # Inside a container the path may be the host's, and not there.
    return str(own if own.is_dir() else mounted)


def _delegated_v2() -> str | None:
    """Return a version 2 folder below which groups with all three controllers can be made.

    A group that has members cannot hand controllers down, so this process moves into a leaf of its own first; it
    does so only if it is alone in a group that is its user's to divide.
    """
    try:
        own = _ROOT / _own_path("").lstrip("/")
        if not {"memory", "pids", "cpu"} <= set((own / "cgroup.controllers").read_text().split()):
            return None
        if not os.access(own, os.W_OK) or not os.access(own / "cgroup.subtree_control", os.W_OK):
            return None
        if own.name == "skep-controller":
            return str(own.parent)
        members = (own / "cgroup.procs").read_text().split()
        if members and members != [str(os.getpid())]:
            return None
        leaf = own / "skep-controller"
        leaf.mkdir(exist_ok=True)
        _write(str(leaf / "cgroup.procs"), str(os.getpid()))
        _write(str(own / "cgroup.subtree_control"), "+memory +pids +cpu")
    except (KeyError, OSError):
        return None
    return str(own)


def _write(path: str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _count(path: str, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0


def _is(folder: str, inode: int) -> bool:
    try:
        return Path(folder).stat().st_ino == inode
    except OSError:
        return False


def _remove(folder: str, inode: int) -> bool:
    if not _is(folder, inode):
        return True
    try:
        Path(folder).rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
