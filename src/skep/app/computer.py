"""A hive's computer: where its workspace is, and a sandbox over it as the settings say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from skep.config import Paths, Settings
from skep.errors import SandboxDisabled
from skep.sandbox.creation import Creation
from skep.sandbox.egress.network import Event, Network
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.tree import Tree

if TYPE_CHECKING:  # it brings the database along, which a throwaway sandbox has no use for
    from skep.state.flags import Flags


def workspace_folder(paths: Paths, hive_id: str) -> Path:
    """Say where the workspace of a hive is on this machine."""
    return paths.home / "workspaces" / hive_id


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


def open_sandbox(paths: Paths, settings: Settings, hive_id: str | None, *, allow: Sequence[str] = ()) -> Creation:
    """Make a sandbox over the workspace of a hive; without a hive, over one that is thrown away.

    It reaches what the policy in the settings allows and what `allow` adds; without either it has no network.
    """
    folder = None if hive_id is None else workspace_folder(paths, hive_id)
    allowed = (*settings.policy.allowed_hosts, *allow)
    network = Network.to(*allowed, on_event=_log_event) if allowed else None
    return Sandbox.create(folder, limits=limits(settings), network=network)


def _log_event(event: Event) -> None:
    structlog.get_logger("skep.egress").info(event.kind, sandbox=event.sandbox, **dict(event.details))


def open_files(paths: Paths, hive_id: str) -> Tree:
    """Open the files of a hive's workspace, whether or not a sandbox runs over it."""
    return Tree.at(str(workspace_folder(paths, hive_id)))


def require_sandbox(flags: Flags, hive: str) -> None:
    """Refuse a hive whose sandbox is switched off."""
    if not flags.sandbox_enabled:
        raise SandboxDisabled(
            f"the sandbox of hive {hive} is switched off",
            hint=f"skep hive set {hive} sandbox_enabled=on, or see: skep rollout list",
        )
