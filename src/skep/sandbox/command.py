"""What a command is given, whatever runs it: its words, its environment, its limits."""

from __future__ import annotations

import resource
from collections.abc import Mapping

from skep.errors import InvalidRequest
from skep.sandbox.limits import CommandLimits, Limits
from skep.sandbox.sandbox import Command, Size, User

#: What a command finds, unless the mechanism says otherwise.
ENVIRONMENT = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "LOGNAME": "agent",
    "PATH": "/workspace/.venv/bin:/workspace/node_modules/.bin:/usr/local/bin:/usr/bin:/bin",
    "SHELL": "/bin/bash",
    "TMPDIR": "/tmp",
    "USER": "agent",
    "XDG_CACHE_HOME": "/cache",
}
#: Where the mechanism has put the library that makes a user look like root, unless it says otherwise.
FAKEROOT = "/run/skep/fakeroot.so"


def words(command: Command) -> list[str]:
    """Return what is executed: a text is the shell's, a list stands as it is."""
    argv = ["/bin/bash", "-c", command] if isinstance(command, str) else list(command)
    if not argv or not argv[0]:
        raise InvalidRequest("the command is empty", hint="give a program to run")
    return argv


def environment_of(
    usual: Mapping[str, str],
    own: Mapping[str, str] | None,
    *,
    user: User,
    terminal: Size | None,
    fakeroot: str = FAKEROOT,
) -> dict[str, str]:
    """Return the environment of a command: its sandbox's usual one, what its user adds, and its own over all."""
    shown = {"TERM": "xterm-256color"} if terminal else {}
    root = {"LOGNAME": "root", "USER": "root", "LD_PRELOAD": fakeroot} if user == "root" else {}
    return {**usual, **shown, **root, **(own or {})}


def rlimits(sandbox: Limits, command: CommandLimits) -> dict[int, tuple[int, int]]:
    """Return what a kernel holds a command to, given its sandbox's limits and its own."""
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: command.file_bytes or sandbox.disk_bytes,
        resource.RLIMIT_NOFILE: command.open_files or sandbox.open_files,
        resource.RLIMIT_NPROC: command.processes or sandbox.processes,
    }
    if command.cpu_s is not None:
        wanted[resource.RLIMIT_CPU] = command.cpu_s
    if command.memory_bytes is not None:
        wanted[resource.RLIMIT_AS] = command.memory_bytes
    hard = {resource.RLIMIT_CPU: 1}  # the warning signal, then a second later the final one
    return {kind: (value, value + hard.get(kind, 0)) for kind, value in wanted.items()}
