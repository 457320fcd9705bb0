"""How to make one sandbox, whatever the mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skep.sandbox.egress.network import Network
from skep.sandbox.limits import Limits
from skep.sandbox.stack import Mount, Stack


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the caller of `Sandbox.create` asked for."""

    #: The workspace on the host; None for one that is thrown away at the end.
    folder: str | None = None
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    #: More of the host, read-only: where it is there to where it appears inside. Never below /workspace.
    read_only: Mapping[str, str] = field(default_factory=dict)
    #: Hand a folder that belongs to root over to the sandbox's own user. Matters only when Skep runs as root.
    adopt: bool = False
    #: The workspace in layers, instead of one folder.
    stack: Stack | None = None
    #: More folders of the host, at places that may be below /workspace.
    mounts: tuple[Mount, ...] = ()
    #: What may be reached; None for no network at all.
    network: Network | None = None
    #: What isolates it.
    mechanism: str = "bubblewrap"
    #: Whose it is: `account`, `session` and what else the caller says. Others may see it.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: What only the mechanism understands, such as the name of an image.
    options: Mapping[str, Any] = field(default_factory=dict)
