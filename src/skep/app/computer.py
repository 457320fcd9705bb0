"""A computer as the settings say: the limits of a sandbox, and one that is thrown away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from skep.app.choosing import Chooser, switched_off
from skep.config import Settings
from skep.errors import SandboxDisabled
from skep.sandbox.egress.network import Event, Network
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.sandbox import Sandbox

if TYPE_CHECKING:  # it brings the database along, which a throwaway sandbox has no use for
    from skep.state.flags import Flags


def limits(settings: Settings) -> Limits:
    """Return the limits of a sandbox from the settings."""
    wanted = settings.sandbox.limits
    return Limits(
        cpus=wanted.cpus,
        memory_bytes=wanted.memory_mb * MIB,
        disk_bytes=wanted.disk_mb * MIB,
        processes=wanted.processes,
        open_files=wanted.open_files,
        output_bytes=wanted.output_kb * 1024,
        command_s=wanted.command_timeout_s,
        command_cap_s=wanted.command_timeout_cap_s,
    )


@asynccontextmanager
async def open_sandbox(settings: Settings, chooser: Chooser, *, allow: Sequence[str] = ()) -> AsyncIterator[Sandbox]:
    """Use a sandbox over a workspace that is thrown away at the end of the block.

    It reaches what the policy in the settings allows and what `allow` adds; without either it has no network.
    """
    allowed = (*settings.policy.allowed_hosts, *allow)
    pinned = settings.policy.upstreams
    network = Network.to(*allowed, upstreams=pinned, on_event=log_event) if allowed else None
    choice = await chooser.for_nobody(frozenset({"network"}) if network else frozenset())
    create = Sandbox.create(
        limits=limits(settings), network=network, mechanism=choice.mechanism, options=choice.options
    )
    async with create as sandbox:
        yield sandbox


def log_event(event: Event) -> None:
    """Write down what the way out has noticed."""
    structlog.get_logger("skep.egress").info(event.kind, sandbox=event.sandbox, **dict(event.details))


def require_sandbox(flags: Flags, hive: str) -> None:
    """Refuse a hive whose sandbox is switched off."""
    if (off := switched_off(flags, hive)) is not None:
        raise SandboxDisabled(off.why, hint=off.options["hint"])
