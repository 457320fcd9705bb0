"""How workspaces can be put together on this machine."""

from __future__ import annotations

from skep.sandbox.layering import layering
from skep.workspace.grounds import Layering

#: The machine's own way, and all of them.
USUAL: Layering = "copy" if layering() == "none" else "overlay"
WAYS: list[Layering] = sorted({USUAL, "copy"}, reverse=True)
