"""Paths as a worker gives them: below /workspace, and nowhere else."""

from __future__ import annotations

import posixpath

from skep.errors import Denied, InvalidRequest

HOME = "/workspace"
HIVE = f"{HOME}/hive"
MEMORY = f"{HIVE}/MEMORY.md"


def within(path: str) -> str:
    """Return the whole path of a file below /workspace. What links lead to is the sandbox's own, whatever they say."""
    if "\0" in path:
        raise InvalidRequest("a path cannot hold a NUL character", hint="leave it out")
    whole = posixpath.normpath(posixpath.join(HOME, path))
    if whole != HOME and not whole.startswith(f"{HOME}/"):
        raise Denied(f"{path[:200]!r} is not below {HOME}", hint="use run_command for files of the system")
    return whole


def shared(path: str) -> bool:
    """Say whether a path is in the hive's own folder, which a sandbox shows for reading alone."""
    return path == HIVE or path.startswith(f"{HIVE}/")
