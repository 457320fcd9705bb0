"""The workspaces of Skep's home, for callers who name the mechanism themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from skep.config.environment import Environment
from skep.sandbox.limits import Limits
from skep.sandbox.mechanisms import Choice, Needs
from skep.workspace.manifest import Manifest
from skep.workspace.workspaces import Workspaces


def workspaces_at(
    home: str | os.PathLike[str] | None = None,
    *,
    limits: Limits | None = None,
    mechanism: str = "bubblewrap",
    options: Mapping[str, Any] | None = None,
) -> Workspaces:
    """Open the workspaces below a folder, by default Skep's state folder."""

    async def choose(_manifest: Manifest, _needs: Needs) -> Choice:
        return Choice(mechanism, options or {}, why="the caller names it")

    return Workspaces.at(home or Environment.read().paths.home, limits=limits, choose=choose)
