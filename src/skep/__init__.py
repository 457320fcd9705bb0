"""Skep: a home for AI agents."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skep.sandbox.browser import Browser
    from skep.sandbox.egress.network import Network, Secret
    from skep.sandbox.interpreter import Interpreter
    from skep.sandbox.limits import Limits
    from skep.sandbox.sandbox import Sandbox
    from skep.workspace.workspaces import Workspaces

__version__ = "0.1.0"

__all__ = ["Browser", "Interpreter", "Limits", "Network", "Sandbox", "Secret", "Workspaces", "__version__"]

_HOMES = {
    "Browser": "skep.sandbox.browser",
    "Interpreter": "skep.sandbox.interpreter",
    "Limits": "skep.sandbox.limits",
    "Network": "skep.sandbox.egress.network",
    "Sandbox": "skep.sandbox.sandbox",
    "Secret": "skep.sandbox.egress.network",
    "Workspaces": "skep.workspace.workspaces",
}


def __getattr__(name: str) -> object:
    # Public names are imported when they are asked for: `import skep` itself must cost next to nothing.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
