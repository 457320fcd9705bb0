"""Control groups: the kernel's own limits on memory, processes and processor time.

Which way is open differs from host to host and is found by trying: version 2 with a delegated subtree, a scope from
systemd, version 1 where its folders are writable, or nothing at all. In the last case rlimits and the watcher
(`watcher.py`) stand in, and `skep doctor` says what is then weaker.

Once a way is found it must hold: a limit that cannot be written stops the sandbox.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from skep.errors import InvalidRequest, SandboxUnusable
from skep.sandbox.delegation import NEEDED, WANTED, delegated_folder
from skep.sandbox.hierarchy import own_folder
from skep.sandbox.limits import Limits

Way = Literal["v2", "v1", "none"]
_CPU_PERIOD_US = 100_000
#: The kernel's least, and more than any machine has.
_LEAST_QUOTA_US, _MOST_CPUS = 1000, 1_000_000
_FINDING = threading.Lock()
Note = Callable[["Group"], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where groups can be made: a folder per controller in version 1, one for all ('') in version 2."""

    way: Way
    parents: Mapping[str, str]

    @classmethod
    def find(cls, note: Note | None = None) -> Place:
        """Return the best place for this process; looked for once, in which case the process may change groups.

        `note` is told of a group that is about to be made to try a place, so that no death leaves it behind.
        """
        with _FINDING:
            if not _found:
                _found.append(_find_place(note or (lambda _: None)))
            return _found[0]

    @property
    def controllers(self) -> frozenset[str]:
        """What a group made here is limited in: `memory`, `pids` and mostly `cpu`."""
        match self.way:
            case "v2":
                return WANTED & set(Path(self.parents[""], "cgroup.subtree_control").read_text().split())
            case "v1" | "none":
                return frozenset(self.parents)


@dataclass(frozen=True, slots=True)
class Group:
    """The control group of one sandbox: one folder in version 2, one per controller in version 1.

    Each folder is kept with its inode number, so that a later folder of the same name is never taken for it; the
    number is 0 while the folder is only planned.
    """

    way: Way
    folders: Mapping[str, tuple[str, int]]

    @classmethod
    def plan(cls, place: Place | None = None) -> Group:
        """Name a group without making it; it has no folders where control groups cannot be used."""
        place = place or Place.find()
        name = f"skep-{secrets.token_hex(8)}"
        return cls(place.way, {controller: (f"{parent}/{name}", 0) for controller, parent in place.parents.items()})

    @classmethod
    def make(cls) -> Group:
        """Make an empty group, or one with no folders where control groups cannot be used."""
        return cls.plan().made()

    def made(self) -> Group:
        """Make the folders that were planned: all or none."""
        folders: dict[str, tuple[str, int]] = {}
        try:
            for controller, (folder, _) in self.folders.items():
                os.mkdir(folder)
                folders[controller] = (folder, os.stat(folder).st_ino)
        except OSError as error:
            self.remove()
            raise SandboxUnusable(
                f"a control group for the sandbox cannot be made: {error.strerror}",
                hint="`skep doctor` shows what this machine allows; end other sandboxes if there are very many",
            ) from error
        return Group(self.way, folders)

    def limit(self, limits: Limits) -> None:
        """Write the limits; raises if one cannot be set. Called before anything of the sandbox runs."""
        check(limits)
        for controller, name, value in self._settings(limits):
            try:
                _write(self._file(controller, name), value)
            except OSError as error:
                if name == "cpu.cfs_quota_us" and error.errno == errno.EINVAL:
                    continue  # version 1 refuses more than a group above has, and that less then holds
                raise SandboxUnusable(
                    f"the sandbox's limit {name} cannot be set to {value}: {error.strerror}",
                    hint="ask for a limit that the kernel accepts; `skep doctor` shows what this machine allows",
                ) from error

    def doors(self) -> list[int]:
        """Open the files through which a process joins; the caller closes them."""
        with contextlib.ExitStack() as on_failure:
            doors = []
            for folder, _ in self.folders.values():
                doors.append(os.open(f"{folder}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
                on_failure.callback(os.close, doors[-1])
            on_failure.pop_all()
        return doors

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
            if _is(folder, inode):
                with contextlib.suppress(OSError):  # it may go at any moment, with all that is in it
                    _kill(folder)

    def _settings(self, limits: Limits) -> Iterator[tuple[str, str, str]]:
        quota = max(_LEAST_QUOTA_US, int(limits.cpus * _CPU_PERIOD_US))
        match self.way:
            case "v2":
                yield "", "memory.max", str(limits.memory_bytes)
                # Only the process that grew too large dies, not the agent and its other commands with it.
                yield "", "memory.oom.group", "0"
                yield "", "pids.max", str(limits.processes)
                yield from self._where_it_exists("", "memory.swap.max", "0")
                yield from self._where_it_exists("", "cpu.max", f"{quota} {_CPU_PERIOD_US}")
            case "v1":
                yield "memory", "memory.limit_in_bytes", str(limits.memory_bytes)
                # Memory and swap together: after the line above, which may not be the larger of the two.
                yield from self._where_it_exists("memory", "memory.memsw.limit_in_bytes", str(limits.memory_bytes))
                # A group above may have it off, and then a process over the limit would hang instead of dying.
                yield "memory", "memory.oom_control", "0"
                yield "pids", "pids.max", str(limits.processes)
                yield "cpu", "cpu.cfs_period_us", str(_CPU_PERIOD_US)
                yield "cpu", "cpu.cfs_quota_us", str(quota)
            case "none":
                pass

    def _where_it_exists(self, controller: str, name: str, value: str) -> Iterator[tuple[str, str, str]]:
        # A kernel without swap has no file for it, and a user without the cpu controller none for that.
        if os.path.exists(self._file(controller, name)):
            yield controller, name, value

    def _file(self, controller: str, name: str) -> str:
        return f"{self.folders[controller][0]}/{name}"


#: The place, once it is found.
_found: list[Place] = []


def _find_place(note: Note) -> Place:
    for candidate in (_place_v2, _place_v1):
        place = candidate()
        if place is not None and _serves(place, note):
            return place
    return Place("none", {})


def _place_v2() -> Place | None:
    folder = delegated_folder()
    return None if folder is None else Place("v2", {"": str(folder)})


def _place_v1() -> Place | None:
    parents = {controller: own_folder(controller) for controller in sorted(WANTED)}
    if any(parent is None or not os.access(parent, os.W_OK) for parent in parents.values()):
        return None
    return Place("v1", {controller: str(parent) for controller, parent in parents.items()})


def _serves(place: Place, note: Note) -> bool:
    """Say whether limits can be set there, by setting some in a group that is removed again."""
    try:
        if not place.controllers >= NEEDED:
            return False
        trial = Group.plan(place)
        note(trial)
        trial = trial.made()
        try:
            trial.limit(Limits())
        finally:
            trial.remove()
    except (OSError, SandboxUnusable):
        return False
    return True


def check(limits: Limits) -> None:
    """Refuse limits that are none."""
    # A version 1 group takes -1 for no limit at all, and a number that is none compares as no other does.
    wrong = [field.name for field in fields(limits) if not getattr(limits, field.name) > 0]
    if wrong or limits.cpus > _MOST_CPUS:
        shown = ", ".join(f"{name}={getattr(limits, name)}" for name in wrong or ["cpus"])
        raise InvalidRequest(f"a sandbox cannot have {shown}", hint="give each limit a number above 0")


def _kill(folder: str) -> None:
    if os.path.exists(f"{folder}/cgroup.kill"):
        _write(f"{folder}/cgroup.kill", "1")
        return
    for pid in Path(folder, "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _write(path: str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _count(path: str, key: str) -> int:
    # Read with bare calls: this happens around every command, and a file object costs five times as much.
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            lines = os.read(fd, 4096).decode().splitlines()
        finally:
            os.close(fd)
        for line in lines:
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
    planned = inode == 0
    if not planned and not _is(folder, inode):
        return True
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return planned  # nothing of ours ever entered a group that was only planned
    return True
