"""Choose what holds a sandbox: the mechanism that a hive or the settings want, or the first fallback that can be used.

Nothing weaker than what is demanded is ever chosen: where nothing is strong enough, there is no sandbox. A fallback
that isolates less than what was wanted is chosen only if the demand allows it, and says so each time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from skep.config.secrets import CloudKeys
from skep.config.settings import Settings
from skep.errors import NotFound, SandboxDisabled, SandboxUnusable
from skep.sandbox.mechanisms import (
    LEVELS,
    MECHANISMS,
    Choice,
    Feature,
    Finding,
    Isolation,
    Needs,
    at_least,
    offers,
    usable,
)

if TYPE_CHECKING:  # most of these bring the database along, which a throwaway sandbox has no use for
    from skep.app.program import Program
    from skep.sandbox.sandbox import Sandbox
    from skep.state.flags import Flags
    from skep.state.hives import Hive
    from skep.workspace.manifest import Manifest

Tell = Callable[[str], None]
#: Why a mechanism does not do for what is needed, by what it lacks.
_LACKS: dict[Feature, str] = {
    "folder": "it cannot hold the files of a workspace",
    "mounts": "it cannot show a folder that several write to",
    "network": "it cannot hold its sandboxes to a list of hosts",
}
#: How long a mechanism that could be used is not asked again.
_FRESH_S = 5.0
_found: dict[tuple[str, str], tuple[float, Finding]] = {}


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a sandbox: the mechanisms in the order of preference, and the least isolation."""

    mechanisms: tuple[str, ...]
    isolation: Isolation = "namespaces"
    needs: Needs = frozenset()


def demand(settings: Settings, hive: Hive | None = None, *, needs: Needs = frozenset()) -> Demand:
    """Return what a hive demands: what it has chosen itself, over the settings.

    The least isolation is the stronger of the two, so that no hive goes below what the settings demand.
    """
    wanted = settings.sandbox
    if hive is None:
        return Demand((wanted.mechanism, *wanted.fallback), wanted.isolation, needs)
    own = hive.upkeep
    first = own.sandbox_mechanism or wanted.mechanism
    then = wanted.fallback if own.sandbox_fallback is None else own.sandbox_fallback
    isolation = max(wanted.isolation, cast(Isolation, own.sandbox_isolation or "none"), key=LEVELS.index)
    return Demand(tuple(dict.fromkeys((first, *then))), isolation, needs)


def options(settings: Settings, keys: CloudKeys, name: str) -> dict[str, Any]:
    """Return what a mechanism is told: its section of the settings, and its key."""
    wanted = settings.sandbox
    match name:
        case "docker":
            told = wanted.docker.model_dump()
        case "gvisor":
            told = {**wanted.gvisor.model_dump(), "engine": wanted.gvisor.engine or None}
            told["host"] = wanted.docker.host if wanted.gvisor.engine else None
        case "e2b":
            told = {**wanted.e2b.model_dump(), "api_key": keys.e2b}
        case "daytona":
            told = {**wanted.daytona.model_dump(), "api_key": keys.daytona}
        case "local":
            told = {"allow_unsafe": wanted.allow_unsafe}
        case _:
            told = {}
    return {key: value for key, value in told.items() if value is not None}


async def choose(settings: Settings, keys: CloudKeys, asked: Demand) -> Choice:
    """Return the first mechanism that is strong enough and can be used; `SandboxUnusable` names why each cannot."""
    first = asked.mechanisms[0]
    if first == "disabled":
        return Choice("disabled", why="as the settings say")
    refused: dict[str, Finding] = {}
    for name in asked.mechanisms:
        told = options(settings, keys, name)
        found = unfit(name, asked) or await _look(name, told, alone=len(asked.mechanisms) == 1)
        if found.usable:
            return _chosen(name, told, found, refused)
        refused[name] = found
    raise _none(asked, refused)


def require_possible(asked: Demand) -> None:
    """Refuse a demand that nothing of what was asked for can meet, on whatever machine."""
    refused = {name: unfit(name, asked) for name in asked.mechanisms if name != "disabled"}
    found = {name: finding for name, finding in refused.items() if finding is not None}
    if len(found) == len(asked.mechanisms):
        raise _none(asked, found)


def unfit(name: str, asked: Demand) -> Finding | None:
    """Say why a mechanism must not be used whatever is found here, or None."""
    mechanism = MECHANISMS[name]
    if not at_least(mechanism.isolation, asked.isolation):
        why = f"its isolation is {mechanism.isolation}, and {asked.isolation} is demanded"
        return Finding(False, why, "name a mechanism that isolates more, or demand less (see: skep doctor)")
    lacks = [_LACKS[feature] for feature in _LACKS if feature in asked.needs - offers(name)]
    if lacks:
        return Finding(False, " and ".join(lacks), "use another mechanism for this, such as bubblewrap")
    return None


async def _look(name: str, told: Mapping[str, Any], *, alone: bool) -> Finding:
    """Find out whether a mechanism can be used; one that was found so is not asked again for a while.

    Bubblewrap is tried by running it, so where there is nothing else it is not: its start says what it lacks.
    """
    if alone and name == "bubblewrap":
        return Finding(True, "it was asked for")
    key = (name, repr(sorted(told.items())))
    known = _found.get(key)
    if known is not None and time.monotonic() - known[0] < _FRESH_S:
        return known[1]
    found = await asyncio.to_thread(usable, name, told)
    if found.usable:
        _found[key] = (time.monotonic(), found)
    return found


def _chosen(name: str, told: Mapping[str, Any], found: Finding, refused: Mapping[str, Finding]) -> Choice:
    wanted = next(iter(refused), None)
    notice = "" if wanted is None else _instead(name, wanted, refused[wanted])
    return Choice(name, told, found.why, notice, wanted)


def _instead(name: str, wanted: str, lack: Finding) -> str:
    has, asked = MECHANISMS[name].isolation, MECHANISMS[wanted].isolation
    weaker = "" if at_least(has, asked) else f", which isolates less ({has} instead of {asked})"
    return f"the sandbox is made by {name}{weaker}, as {wanted} cannot be used: {lack.why}"


def _none(asked: Demand, refused: Mapping[str, Finding]) -> SandboxUnusable:
    reasons = "; ".join(f"{name}: {found.why}" for name, found in refused.items())
    what = "a workspace" if "folder" in asked.needs else "a sandbox"
    fixes = dict.fromkeys(found.fix for found in refused.values() if found.fix)
    return SandboxUnusable(
        f"nothing that was asked for can hold {what} with isolation {asked.isolation}. {reasons}",
        hint="; or ".join(fixes) or "skep doctor",
    )


def switched_off(flags: Flags, hive: str) -> Choice | None:
    """Return the choice for a hive whose sandbox is switched off, which refuses everything; None if it is on."""
    if flags.sandbox_enabled:
        return None
    reason = f"the sandbox of hive {hive} is switched off"
    hint = f"skep hive set {hive} sandbox_enabled=on, or see: skep rollout list"
    return Choice("disabled", {"reason": reason, "hint": hint}, why=reason)


def _quiet(_: str) -> None:
    """Tell nobody."""


class Chooser:
    """Chooses for whoever starts a sandbox, and says what has to be known about the choice.

    Without a program no hive can be looked up: then the settings decide for all.
    """

    def __init__(
        self,
        settings: Settings,
        keys: CloudKeys | None = None,
        *,
        program: Program | None = None,
        tell: Tell = _quiet,
    ) -> None:
        self._settings = settings
        self._keys = keys or CloudKeys()
        self._program = program
        self._tell = tell
        self._complaint = ""

    @property
    def settings(self) -> Settings:
        """The settings in effect."""
        return self._program.settings if self._program else self._settings

    async def for_nobody(self, needs: Needs = frozenset()) -> Choice:
        """Choose for a sandbox that is thrown away."""
        return self._told(await choose(self.settings, self._keys, demand(self.settings, needs=needs)))

    async def for_workspace(self, manifest: Manifest, needs: Needs) -> Choice:
        """Choose for a workspace, by the hive that its labels name."""
        hive = await self._hive(manifest)
        if hive is not None and (off := await self.off(hive)) is not None:
            return off
        settings = self.settings
        try:
            choice = self._told(await choose(settings, self._keys, demand(settings, hive, needs=needs)))
        except SandboxUnusable as error:
            self._complain(error)
            raise
        if hive is not None:
            await self._record(hive, choice)
        return choice

    def reach(self, name: str) -> dict[str, Any]:
        """Say how a mechanism is reached on whose machine files of a workspace still are, chosen or not."""
        return options(self.settings, self._keys, name)

    async def _record(self, hive: Hive, choice: Choice) -> None:
        from skep.sessions.ledger import ACTOR
        from skep.state.events import FallbackChosen

        if self._program is not None and choice.instead_of is not None:
            event = FallbackChosen(mechanism=choice.mechanism, instead_of=choice.instead_of, why=choice.notice)
            await self._program.log.append(event, hive_id=hive.id, account_id=hive.account_id, actor=ACTOR)

    async def require(self, manifest: Manifest) -> None:
        """Refuse a workspace in which nothing may run, before anything is done to it."""
        hive = await self._hive(manifest)
        if hive is not None and (off := await self.off(hive)) is not None:
            raise SandboxDisabled(off.why, hint=off.options["hint"])

    async def off(self, hive: Hive) -> Choice | None:
        """Return the choice for a hive whose sandbox is switched off, None for another.

        A hive that demands what nothing can give is refused at once: trying again would not help.
        """
        if self._program is not None:
            flags = await self._program.rollouts.in_effect(hive.flags, hive.account_id)
            if (off := switched_off(flags, hive.name)) is not None:
                return off
        require_possible(demand(self.settings, hive, needs=frozenset({"folder"})))
        return None

    def suits(self, hive: Hive, sandbox: Sandbox) -> bool:
        """Say whether a sandbox that runs isolates as much as a hive demands by now."""
        # Who has joined a sandbox has joined one with the native agent, which shares this kernel.
        known = MECHANISMS.get(sandbox.mechanism)
        return at_least(known.isolation if known else "namespaces", demand(self.settings, hive).isolation)

    async def _hive(self, manifest: Manifest) -> Hive | None:
        hive_id, account = manifest.labels.get("hive"), manifest.labels.get("account")
        if self._program is None or hive_id is None or account is None:
            return None
        try:
            return await self._program.hives.show(hive_id, account_id=account, deleted=True)
        except NotFound:  # it came from another home, and is nobody's here
            return None

    def _complain(self, error: SandboxUnusable) -> None:
        """Say once what is in the way: whoever starts a sandbox may try again for a while, and a person wonders."""
        if error.message != self._complaint:
            self._complaint = error.message
            self._tell(f"{error.message}; try: {error.hint}")

    def _told(self, choice: Choice) -> Choice:
        if choice.notice:
            self._tell(choice.notice)
        return choice
