"""Where a process stands in the hierarchies of control groups, as folders.

A path in /proc/self/cgroup counts from the root of the hierarchy, or of the cgroup namespace; what is mounted may be
only a part of it, anywhere, with several controllers in one place (`cpu,cpuacct`). So the two are put together from
the mount table, and a folder counts only if it lists the very process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path


def own_folder(controller: str, proc: Path = Path("/proc/self")) -> Path | None:
    """Return the folder of this process's group for a version 1 controller, or for version 2 with ''."""
    return _folder(controller, proc, os.getpid(), proc)


def folder_of(pid: int, controller: str) -> Path | None:
    """Return the folder of another process's group, as this process sees it."""
    return _folder(controller, Path(f"/proc/{pid}"), pid, Path("/proc/self"))


def _folder(controller: str, whose: Path, pid: int, seen_by: Path) -> Path | None:
    try:
        path = _path(controller, whose)
        for root, mount_point in _mounts(controller, seen_by):
            folder = _below(path, root, mount_point)
            if folder is not None and str(pid) in members(folder):
                return folder
    except (KeyError, OSError):
        pass
    return None


def members(folder: Path) -> list[str]:
    """Return the processes in a group; those of other process namespaces appear as '0'."""
    return (folder / "cgroup.procs").read_text().split()


def _path(controller: str, proc: Path) -> str:
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    raise KeyError(controller)


def _mounts(controller: str, proc: Path) -> Iterator[tuple[str, str]]:
    """Yield the mounts of a controller: which part of the hierarchy, and where."""
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split(" ")[3:5]
        kind, _, options = after.split(" ", 2)
        if (kind == "cgroup2" and not controller) or (kind == "cgroup" and controller in options.split(",")):
            yield _unescaped(root), _unescaped(mount_point)


def _below(path: str, root: str, mount_point: str) -> Path | None:
    rest = os.path.relpath(path, root)
    if rest.startswith(".."):
        return None
    folder = Path(mount_point, rest)
    return folder if folder.is_dir() else None


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
