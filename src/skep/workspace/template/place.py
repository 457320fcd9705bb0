"""Places of a workspace that a template may speak of."""

from __future__ import annotations

from posixpath import normpath

from skep.errors import InvalidRequest
from skep.state.names import shown

_ROOT = "/workspace"
#: What Skep itself puts there and keeps as it has to be.
_TAKEN = ("hive", ".venv", "node_modules")
_HINT = "name a folder or a file such as /workspace/reference"


def workspace_place(path: str) -> str:
    """Return a path that lies below /workspace and is spelled in the one way in which paths are compared."""
    if not path.startswith("/"):
        raise InvalidRequest(f"{shown(path)} is not an absolute path", hint=_HINT)
    if not path.isprintable() or len(path) > 1000 or any(len(part.encode()) > 255 for part in path.split("/")):
        raise InvalidRequest(f"{shown(path)} is not a usable path", hint=_HINT)
    if not normpath(path).startswith(f"{_ROOT}/"):
        raise InvalidRequest(f"{shown(path)} does not lie below {_ROOT}, and nothing else can be set", hint=_HINT)
    if normpath(path) != path:
        raise InvalidRequest(f"{shown(path)} is not a plain path", hint=f"write it as {normpath(path)}")
    if (first := path.split("/")[2]) in _TAKEN:
        raise InvalidRequest(f"{shown(path)} is Skep's own: {_ROOT}/{first} is kept as it has to be", hint=_HINT)
    return path
