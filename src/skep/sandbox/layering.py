"""Whether a workspace can have layers on this machine."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Literal

from skep.errors import SandboxUnusable
from skep.sandbox.erase import erase
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Stack


@cache
def layering() -> Literal["overlay", "none"]:
    """Say whether this kernel lets a sandbox have layers, by trying it once."""
    folder = tempfile.mkdtemp(prefix="skep-layers-")
    try:
        return "overlay" if _tried(folder) else "none"
    except SandboxUnusable:
        return "none"
    finally:
        erase(folder, os.stat(folder).st_ino)  # the kernel leaves a folder there that even its owner may not read


def _tried(folder: str) -> bool:
    for name in ("upper", "work", "layer"):
        Path(folder, name).mkdir()
    Path(folder, "layer", "below").touch()
    with Sandbox.create(stack=Stack(f"{folder}/upper", f"{folder}/work", (f"{folder}/layer",))) as sandbox:
        return sandbox.run(["mv", "below", "above"]).ok
