"""Sandboxes of E2B: how one is started, held, paused and given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from skep.errors import Conflict, InvalidRequest, LimitReached, NotFound, SandboxLost, SkepError, Unavailable
from skep.sandbox.e2b.line import MachineLine
from skep.sandbox.e2b.machine import FAKEROOT, Machine, Options
from skep.sandbox.e2b.network import hosts, rules
from skep.sandbox.egress.policy import Policy
from skep.sandbox.link import Housing
from skep.sandbox.recipe import Recipe
from skep.sandbox.relay.link import RelayedLink
from skep.sandbox.stream import StreamSandbox
from skep.sandbox.twin.conversation import Conversation
from skep.sandbox.twin.files import TwinFiles, count


class E2BHousing(Housing):
    """The machine around a twin."""

    def __init__(self, machine: Machine, link: RelayedLink, options: Options) -> None:
        self.id = machine.id
        self.machine = machine
        self.options = options
        self.paused = False
        #: Whether stopping may end the machine. One that was here before is not ended because a twin did not start.
        self.ours = True
        self.keep = options.keep
        self._link = link
        self._turning = asyncio.Lock()

    async def alive(self) -> bool:
        try:
            return await (self.machine.exists() if self.paused else self.machine.running())
        except SandboxLost:
            return False
        except SkepError:
            return True  # nobody says that it is gone

    async def pause(self) -> bool:
        async with self._turning:
            if not self.paused:
                await self._halt()
        return True

    async def resume(self) -> bool:
        async with self._turning:
            if self.paused:
                await self._go_on()
        return True

    def forgo(self) -> None:
        self.keep = False

    async def end(self) -> None:
        with contextlib.suppress(SandboxLost):
            if self.ours and not self.keep:
                await self.machine.kill()
            elif not self.paused:
                await self.machine.pause()

    async def _halt(self) -> None:
        try:
            await self._link.rest()
        except ConnectionError as error:
            raise Unavailable(f"the machine cannot be reached: {error}", hint="try again") from error
        self.paused = True
        try:
            await self.machine.pause()
        except SandboxLost:
            await self._give_up()
            raise
        except SkepError:
            await self._go_on()
            raise

    async def _go_on(self) -> None:
        try:
            await self.machine.wake()
            await self._link.wake()
        except SandboxLost:
            await self._give_up()
            raise
        self.paused = False

    async def _give_up(self) -> None:
        await self._link.close()
        self.paused = False


class E2BSandbox(StreamSandbox):
    """A sandbox on a machine of E2B. Its `id` is E2B's own, with which the machine can be used again.

    `pause` halts the whole machine, memory and all: until `resume` there is nobody who could read a file or end a
    command whose time is up, and every call is a `Conflict`. A machine on which nothing has run and of which nothing
    was asked for `timeout_s` stops by itself.
    """

    mechanism: ClassVar[str] = "e2b"

    def __init__(self, conversation: Conversation, housing: Housing, recipe: Recipe, **others: Any) -> None:
        super().__init__(conversation, housing, recipe, **others)
        assert isinstance(housing, E2BHousing)
        self._house = housing
        self._networked = recipe.network is not None
        self._awake = _Awake(conversation, housing)
        self._conversation = cast(Conversation, self._awake)
        self.files = TwinFiles(self._conversation)
        # The relay notices by itself that a machine is gone, at less cost than by asking the twin all the time.
        self._watching.cancel()
        self._watching = asyncio.create_task(self._keep())

    def preview(self, port: int) -> tuple[str, dict[str, str]]:
        """Return where E2B serves a port of the machine by HTTPS, and the headers that it asks for.

        Without the headers nobody gets in, unless the machine was made with the option `public`.
        """
        host, headers = self._house.machine.address(port)
        return f"https://{host}", headers

    async def set_policy(self, policy: Policy) -> None:
        if not self._networked:
            await super().set_policy(policy)
        await self._house.machine.restrict(policy)

    async def _keep(self) -> None:
        """Put off the hour at which the machine stops, for as long as it is used."""
        period_s = self._house.options.timeout_s / 3
        while not self._awake.lost.is_set():
            await asyncio.sleep(period_s)
            with contextlib.suppress(Unavailable, LimitReached, Conflict):  # the next turn comes soon enough
                if not self._house.paused and (self._awake.used or await count(self._awake.conversation) > 0):
                    await self._house.machine.extend()
                    self._awake.used = False


class _Awake:
    """A conversation, refused while the machine is halted: there is nobody who could answer."""

    def __init__(self, conversation: Conversation, housing: E2BHousing) -> None:
        self.conversation = conversation
        self._housing = housing
        self.lost = conversation.lost
        self.used = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.conversation, name)

    def open(self, party: Any) -> int:
        self._require()
        return self.conversation.open(party)

    async def ask(self, kind: int, payload: bytes = b"") -> Any:
        self._require()
        return await self.conversation.ask(kind, payload)

    def say(self, kind: int, number: int, payload: bytes = b"") -> None:
        self.used = True  # whatever takes long, such as a workspace on its way, goes on by this
        self.conversation.say(kind, number, payload)

    def _require(self) -> None:
        self.used = True
        if self._housing.paused and not self.conversation.lost.is_set():
            raise Conflict(f"the machine {self._housing.id} is paused", hint="resume the sandbox first")


async def start(recipe: Recipe) -> E2BSandbox:
    """Start a sandbox with this mechanism."""
    options = Options.read(recipe.options)
    _refuse(recipe)
    machine, ours = await _machine(recipe, options)
    line = MachineLine(machine)
    try:
        if not ours:
            await machine.take_over(recipe)
        await machine.prepare(names=hosts(recipe))
        await line.open()
    except BaseException:
        if ours:
            with contextlib.suppress(SkepError):
                await machine.kill()
        raise
    link = RelayedLink(line)
    housing = E2BHousing(machine, link, options)
    housing.ours = ours
    sandbox = await E2BSandbox.over(link, housing, recipe, fakeroot=FAKEROOT)
    housing.ours = True
    return sandbox


async def forget(told: Mapping[str, Any], *, machine: str | None, labels: Mapping[str, str]) -> None:
    """End a machine, or all that have these labels, without using it. One that is not there is as good."""
    options = Options.read(told)
    with contextlib.suppress(SandboxLost):
        await Machine.forget(options, machine=machine, labels=labels)


async def volumes(told: Mapping[str, Any]) -> list[str]:
    """Return the names of all volumes."""
    return await Machine.volumes(Options.read(told))


async def _machine(recipe: Recipe, options: Options) -> tuple[Machine, bool]:
    """Return the machine to use, and whether it was made for this."""
    if options.sandbox_id is None and not options.find:
        return await Machine.create(recipe, options), True
    wanted = options.sandbox_id or await _found(recipe, options)
    try:
        return await Machine.connect(wanted, options), False
    except SandboxLost as error:
        raise NotFound(
            f"there is no machine {wanted!r} at E2B any more", hint="create another sandbox, without sandbox_id"
        ) from error


async def _found(recipe: Recipe, options: Options) -> str:
    if not recipe.labels:
        raise InvalidRequest("a machine is found by its labels, and there are none", hint="pass labels= or sandbox_id")
    found = await Machine.find(recipe.labels, options)
    if not found:
        raise NotFound("no machine at E2B has these labels", hint="create another sandbox, without the option find")
    if len(found) > 1:
        raise Conflict(f"machines {', '.join(found[:5])} have these labels", hint="name one of them with sandbox_id")
    return found[0]


def _refuse(recipe: Recipe) -> None:
    """Refuse what cannot be done on another machine, rather than do less."""
    asked = {
        "folder": recipe.folder is not None,
        "stack": recipe.stack is not None,
        "mounts": bool(recipe.mounts),
        "read_only": bool(recipe.read_only),
    }
    for name, given in asked.items():
        if given:
            raise InvalidRequest(
                f"a machine of E2B cannot show a folder of this one, so {name} is refused",
                hint="copy files in with sandbox.files, or use another mechanism",
            )
    if recipe.network is not None:
        if recipe.network.secrets:
            raise InvalidRequest("E2B cannot put secrets in on the way", hint="use another mechanism for them")
        rules(recipe.network.policy)
