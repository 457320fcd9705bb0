"""Look at every mechanism: whether it can be used here, how far it isolates, and how fast it is, measured just now."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, replace

from skep.app.choosing import choose, demand, options
from skep.app.computer import limits
from skep.config import Settings
from skep.config.secrets import CloudKeys
from skep.errors import SandboxUnusable, SkepError
from skep.sandbox.mechanisms import MECHANISMS, Choice, Isolation, usable
from skep.sandbox.sandbox import Sandbox

_CREATIONS, _EXECUTIONS = 3, 30
#: A sandbox that somebody else runs costs them, and may cost the user.
_REMOTE_CREATIONS = 1


@dataclass(frozen=True, slots=True)
class Sighting:
    """One mechanism as it is found here. Times are medians; None where nothing was measured."""

    name: str
    isolation: Isolation
    usable: bool
    found: str
    fix: str = ""
    create_ms: float | None = None
    exec_ms: float | None = None


async def survey(settings: Settings, keys: CloudKeys, *, bench: bool = False) -> list[Sighting]:
    """Look at all mechanisms; with `bench`, make sandboxes with those that can be used, and time them."""
    seen = [await _look(name, settings, keys) for name in MECHANISMS]
    if not bench:
        return seen
    return [await _timed(one, settings, keys) if one.usable else one for one in seen]


async def settled(settings: Settings, keys: CloudKeys) -> Choice | SandboxUnusable:
    """Say what the settings come to here: what holds a sandbox, or why nothing does."""
    try:
        return await choose(settings, keys, demand(settings))
    except SandboxUnusable as error:
        return error


async def _look(name: str, settings: Settings, keys: CloudKeys) -> Sighting:
    found = await asyncio.to_thread(usable, name, options(settings, keys, name))
    return Sighting(name, MECHANISMS[name].isolation, found.usable, found.why, found.fix)


async def _timed(one: Sighting, settings: Settings, keys: CloudKeys) -> Sighting:
    creations = _REMOTE_CREATIONS if one.isolation == "machine" else _CREATIONS
    try:
        made = [await _create(one.name, settings, keys) for _ in range(creations)]
    except SkepError as error:
        return replace(one, usable=False, found=error.message, fix=error.hint or "")
    creates, executes = zip(*made, strict=True)
    return replace(one, create_ms=statistics.median(creates), exec_ms=statistics.median(executes))


async def _create(name: str, settings: Settings, keys: CloudKeys) -> tuple[float, float]:
    """Return how many milliseconds it takes to a first command done, and for a command from then on."""
    began = time.perf_counter()
    create = Sandbox.create(limits=limits(settings), mechanism=name, options=options(settings, keys, name))
    async with create as sandbox:
        await sandbox.run(["/bin/true"])
        ready_ms = (time.perf_counter() - began) * 1000
        return ready_ms, statistics.median([await _execute(sandbox) for _ in range(_EXECUTIONS)])


async def _execute(sandbox: Sandbox) -> float:
    began = time.perf_counter()
    await sandbox.run(["/bin/true"])
    return (time.perf_counter() - began) * 1000
