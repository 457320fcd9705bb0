"""The contract suite that every sandbox mechanism must pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from skep.testing.commands import (
    CommandLimitPromises,
    RunPromises,
    SignalPromises,
    StreamPromises,
    TimePromises,
    UserPromises,
)
from skep.testing.jobs import JobPromises
from skep.testing.lifecycle import DeathPromises, LifePromises
from skep.testing.promise import Gap
from skep.testing.shells import ShellPromises
from skep.testing.terminals import TerminalPromises
from skep.testing.tree import FilePromises, HostileFilePromises, WatchPromises


class SandboxContract(
    RunPromises,
    TimePromises,
    CommandLimitPromises,
    StreamPromises,
    SignalPromises,
    UserPromises,
    TerminalPromises,
    JobPromises,
    ShellPromises,
    FilePromises,
    HostileFilePromises,
    WatchPromises,
    LifePromises,
    DeathPromises,
):
    """Subclass it in a test module and give it a fixture `make_sandbox`; see docs/guides/mechanisms.md."""

    #: What the mechanism does not keep, by the name of the test, or `name[case]` for one case of it.
    gaps: ClassVar[Mapping[str, Gap]] = {}
