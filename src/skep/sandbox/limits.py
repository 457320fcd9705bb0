"""What a sandbox and a command may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LimitName = Literal["time", "memory", "processes", "disk", "cpu", "output"]

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use. `command_s` is the default time of one command, `command_cap_s` the most it gets."""

    cpus: float = 2.0
    memory_bytes: int = 4 * GIB
    disk_bytes: int = 5 * GIB
    inodes: int = 500_000
    processes: int = 512
    open_files: int = 4096
    tmp_bytes: int = 512 * MIB
    cache_bytes: int = 512 * MIB
    shm_bytes: int = 64 * MIB
    output_bytes: int = 10 * MIB
    command_s: float = 30.0
    command_cap_s: float = 300.0

    def time_for(self, asked_s: float | None) -> float:
        """Return how long a command may run that is waited for, given what was asked for it."""
        return min(self.command_s if asked_s is None else asked_s, self.command_cap_s)


@dataclass(frozen=True, slots=True)
class CommandLimits:
    """What one command may use, within its sandbox's limits; None leaves the sandbox's own."""

    cpu_s: int | None = None
    memory_bytes: int | None = None
    file_bytes: int | None = None
    open_files: int | None = None
    processes: int | None = None
