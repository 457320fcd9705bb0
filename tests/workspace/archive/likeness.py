"""Everything about a tree that an archive must bring back."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from skep.workspace.layers.overlay import merged, opened

Likeness = dict[str, tuple[Any, ...]]


def likeness(tree: str | Path) -> Likeness:
    """Describe a tree: kinds, modes, times, contents, attributes, marks, and which names are of one file."""
    found: Likeness = {"": _basics(str(tree), Path(tree).stat())}
    first: dict[int, str] = {}
    for entry in merged([str(tree)]):
        what: tuple[Any, ...] = (entry.kind, entry.opaque)
        if entry.kind == "file":
            with open(opened(entry), "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            what += (content, first.setdefault(entry.stat.st_ino, entry.path))
        elif entry.kind == "link":
            what += (str(Path(entry.host).readlink()),)
        if entry.kind != "whiteout":
            what += _basics(entry.host, entry.stat)
        found[entry.path] = what
    return found


def _basics(path: str, found: os.stat_result) -> tuple[Any, ...]:
    attributes: dict[str, bytes] = {}
    # What cannot be read has none in these tests.
    if stat.S_IFMT(found.st_mode) in (stat.S_IFREG, stat.S_IFDIR) and os.access(path, os.R_OK):
        attributes = {name: os.getxattr(path, name) for name in os.listxattr(path) if not _own(name)}
    return (stat.S_IFMT(found.st_mode), stat.S_IMODE(found.st_mode), found.st_mtime_ns, attributes)


def _own(name: str) -> bool:
    return name.startswith("user.overlay.") and not name.startswith("user.overlay.overlay.")
