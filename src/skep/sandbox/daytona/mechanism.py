"""Sandboxes of Daytona: what may be asked for, and how one is started and given up."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from skep.errors import Conflict, InvalidRequest, NotFound, SandboxLost, SandboxUnusable
from skep.sandbox.daytona.house import FAKEROOT, House, Line, evict, prepare
from skep.sandbox.daytona.service import Machine, PreviewLink, Service, Wanted, load
from skep.sandbox.limits import GIB
from skep.sandbox.recipe import Recipe
from skep.sandbox.stream import StreamSandbox, twin_program

#: What Skep's labels are called among others of the organization.
_LABEL = "skep."
#: Seconds without a word from the controller after which all that runs for it ends.
_PATIENCE_S = 15
_LONGEST_LINK_S = 86400


class Options(BaseModel):
    """What `options=` may have for Daytona."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Without one the SDK looks for DAYTONA_API_KEY.
    api_key: SecretStr | None = None
    api_url: str | None = None
    #: The region.
    target: str | None = None
    #: What a new machine is made from: a snapshot of the organization, or an image. Only for an image can the
    #: recipe's limits be asked for.
    snapshot: str | None = None
    image: str | None = None
    #: A machine that is there; it is started if it is not running.
    sandbox_id: str | None = None
    #: Stop the machine at the end and keep its disk; the next sandbox with the same labels gets it again.
    keep: bool = False
    #: Volumes by name and where they appear; one that is not there is made.
    volumes: dict[str, str] = Field(default_factory=dict)
    #: After how long without work the machine is stopped, and after how long at rest it is archived.
    auto_stop_s: float = Field(default=300, ge=60)
    auto_archive_s: float | None = Field(default=None, ge=60)
    #: Daytona's own allow-lists, in its words, instead of no network at all.
    network_allow_list: str | None = None
    domain_allow_list: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        try:
            options = cls.model_validate(dict(given))
        except ValidationError as error:
            # The values stay out of the message: one of them is the key.
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise InvalidRequest(
                f"the options for Daytona are wrong: {wrong}", hint=f"use {', '.join(cls.model_fields)}"
            ) from None
        if options.snapshot is not None and options.image is not None:
            raise InvalidRequest("a machine is made from a snapshot or from an image", hint="give one of the two")
        return options


class DaytonaSandbox(StreamSandbox):
    """A sandbox on a machine of Daytona; its id is the machine's."""

    mechanism: ClassVar[str] = "daytona"
    _house: House

    @classmethod
    async def in_house(cls, house: House, recipe: Recipe, options: Options) -> Self:
        """Start the twin on a machine that runs."""
        await prepare(house.machine, twin_program())
        line = house.line = await Line.open(house.machine, "--patience", str(_PATIENCE_S))
        sandbox = await cls.over(line, house, recipe, fakeroot=FAKEROOT)
        sandbox._house = house
        house.at_end = "stop" if options.keep or options.sandbox_id is not None else "remove"
        house.keep_awake(sandbox.occupied, every_s=options.auto_stop_s / 4)
        return sandbox

    async def preview_link(self, port: int, *, lasts_s: int | None = 3600) -> PreviewLink:
        """Return an address at which whoever knows it reaches a server on the machine, for so long.

        With None it lasts as long as the machine runs, and the token has to be sent as a header. Daytona passes the
        traffic on, so it sees it. `connect` and `expose` need none of this: they lead through the twin.
        """
        if not 0 < port < 65536 or (lasts_s is not None and not 0 < lasts_s <= _LONGEST_LINK_S):
            raise InvalidRequest(
                f"there is no preview of port {port} for {lasts_s} s",
                hint=f"use a port, and at most {_LONGEST_LINK_S} s",
            )
        return await self._house.machine.preview(port, lasts_s)

    async def archive(self) -> None:
        """Stop the machine and move its disk to cold storage. `options={"sandbox_id": …}` brings it back."""
        if self._house.at_end == "remove":
            raise InvalidRequest(
                f"machine {self.id} was made to be thrown away when it stops",
                hint="make it with options={'keep': True}",
            )
        self._house.at_end = "archive"
        await self.stop()


async def start(recipe: Recipe) -> DaytonaSandbox:
    """Make a machine, or wake the one that was asked for, and start the twin on it."""
    options = Options.read(recipe.options)
    _refuse(recipe)
    service = await _service(options)
    try:
        house = await _house(service, recipe, options)
    except BaseException:
        await service.close()
        raise
    try:
        return await DaytonaSandbox.in_house(house, recipe, options)
    except BaseException:
        await house.end()
        raise


async def forget(told: Mapping[str, Any], *, machine: str | None, labels: Mapping[str, str]) -> None:
    """Remove a machine, or all that have these labels, without using it. One that is not there is as good."""
    service = await _service(Options.read(told))
    try:
        with contextlib.suppress(NotFound, SandboxLost):
            for one in [await service.get(machine)] if machine else await service.find(_named(labels)):
                await one.remove()
    finally:
        await service.close()


async def volumes(told: Mapping[str, Any]) -> list[str]:
    """Return the names of all volumes."""
    service = await _service(Options.read(told))
    try:
        return await service.volumes()
    finally:
        await service.close()


async def _service(options: Options) -> Service:
    await asyncio.to_thread(load)
    key = options.api_key.get_secret_value() if options.api_key is not None else None
    return Service(key=key, url=options.api_url, target=options.target)


async def _house(service: Service, recipe: Recipe, options: Options) -> House:
    """Return a house with a machine that runs; until the twin runs too, a new one is removed if anything fails."""
    machine = await _known(service, recipe, options)
    if machine is None:
        machine = await service.make(_wanted(recipe, options))
        house = House(service, machine, at_end="remove")
    else:
        house = House(service, machine, at_end="stop")
        await machine.awaken()
        await evict(machine)
    online = options.network_allow_list is not None or options.domain_allow_list is not None
    if machine.public or not (machine.offline or online):
        await house.end()
        raise SandboxUnusable(
            f"machine {machine.id} {'is open to everybody' if machine.public else 'has a network'}, and was not to be",
            hint="see whether the organization overrules it; for a network name Daytona's own lists in the options",
        )
    return house


async def _known(service: Service, recipe: Recipe, options: Options) -> Machine | None:
    """Return the machine that was asked for by its id, or the one kept under these labels."""
    if options.sandbox_id is not None:
        try:
            return await service.get(options.sandbox_id)
        except NotFound as error:
            raise NotFound(
                f"machine {options.sandbox_id[:80]!r} is not there any more",
                hint="leave sandbox_id out to make another; what was on it is gone",
            ) from error
    if not options.keep or not recipe.labels:
        return None
    found = await service.find(_named(recipe.labels))
    if len(found) > 1:
        names = ", ".join(machine.id for machine in found[:5])
        raise Conflict(f"{len(found)} machines have these labels: {names}", hint="choose one by sandbox_id")
    return found[0] if found else None


def _wanted(recipe: Recipe, options: Options) -> Wanted:
    limits, ident = recipe.limits, secrets.token_hex(8)
    archive_s = options.auto_archive_s
    return Wanted(
        name=f"skep-{ident}",
        labels={**_named(recipe.labels), f"{_LABEL}sandbox": ident},
        env=recipe.env,
        snapshot=options.snapshot,
        image=options.image,
        size=(math.ceil(limits.cpus), math.ceil(limits.memory_bytes / GIB), math.ceil(limits.disk_bytes / GIB)),
        volumes=options.volumes,
        stop_minutes=math.ceil(options.auto_stop_s / 60),
        archive_minutes=None if archive_s is None else math.ceil(archive_s / 60),
        delete_at_stop=not options.keep,
        addresses=options.network_allow_list,
        domains=options.domain_allow_list,
    )


def _named(labels: Mapping[str, str]) -> dict[str, str]:
    return {_LABEL + name: value for name, value in labels.items()}


def _refuse(recipe: Recipe) -> None:
    """Say no to what a machine elsewhere cannot do, before there is one."""
    kept = "copy files with `files`, or keep the machine with options={'keep': True}"
    own = {"folder": recipe.folder, "stack": recipe.stack, "mounts": recipe.mounts, "read_only": recipe.read_only}
    for name, value in own.items():
        if value:
            raise InvalidRequest(
                f"a machine of Daytona has a disk of its own, so `{name}` cannot be had there", hint=kept
            )
    network = recipe.network
    if network is not None and (network.policy.rules or network.secrets):
        raise InvalidRequest(
            "Daytona cannot keep to an allow-list of hosts, ports and secrets as Skep does",
            hint="leave network= out for none, or name Daytona's own lists in options: domain_allow_list",
        )
