"""Version 2: find a group that is this process's to divide, or ask systemd for one.

A group that holds processes cannot hand controllers down, so the controlling process first moves into a leaf of its
own, beside the sandboxes. It does so only in a group that was delegated (systemd takes controllers away from others'
children as it sees fit, and with them the limits), and only if it is alone there.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from skep.sandbox import scope
from skep.sandbox.hierarchy import members, own_folder

LEAF = "skep-controller"
#: What a group must be able to limit to be of use. The processor is limited too where that is delegated: systemd
#: before 252 does not hand it to ordinary users.
NEEDED = frozenset({"memory", "pids"})
WANTED = NEEDED | {"cpu"}


def delegated_folder() -> Path | None:
    """Return a folder below which groups with limits can be made; this process may be moved for it."""
    try:
        own = own_folder("")
        if own is None:
            return None
        if (folder := _divided(own)) is not None:
            return folder
        if scope.is_harmless(own) and scope.enter():
            entered = own_folder("")
            return None if entered is None else _divided(entered, ours=True)
    except OSError:
        pass
    return None


def controllers(file: Path) -> frozenset[str]:
    """Return the controllers that we want and that a `cgroup.controllers` or `cgroup.subtree_control` lists."""
    return WANTED & set(file.read_text().split())


def _divided(own: Path, *, ours: bool = False) -> Path | None:
    """Make a group's folder ready for groups below it; None if it is not for us to do. `ours` was asked for."""
    if own.name == LEAF and controllers(own.parent / "cgroup.subtree_control") >= NEEDED and _writable(own.parent):
        return own.parent
    found = controllers(own / "cgroup.controllers")
    if not found >= NEEDED or not _writable(own):
        return None
    is_root, is_alone = _is_root(own), members(own) == [str(os.getpid())]
    if not (is_root or is_alone) or not (ours or _is_delegated(own)):
        return None
    if is_root:
        _hand_down(own, found)
        return own
    return own if _moved(own, found) else None


def _moved(own: Path, found: frozenset[str]) -> bool:
    leaf = own / LEAF
    leaf.mkdir(exist_ok=True)
    try:
        _move_to(leaf)
        _hand_down(own, found)
    except OSError:
        # Somebody else came in between; we are back where we were.
        _move_to(own)
        with contextlib.suppress(OSError):
            leaf.rmdir()
        return False
    return True


def _is_delegated(own: Path) -> bool:
    if not Path("/run/systemd/system").is_dir():
        return True  # nobody else manages the groups here: what may be written may be divided
    if any(_mark(own, name) for name in ("user.delegate", "trusted.delegate")):
        return True
    uid = os.geteuid()
    if uid == 0 or own.stat().st_uid != uid:
        return False
    # Where there is no mark to see: the system gives a folder to a user only by delegation; the user's own manager,
    # which leaves no mark, is asked.
    return own.parent.stat().st_uid != uid or scope.is_delegated(own.name)


def _mark(own: Path, name: str) -> bool:
    try:
        return os.getxattr(own, name) == b"1"
    except OSError:
        return False


def _is_root(own: Path) -> bool:
    """Say whether this is the root of all groups, which alone may hold processes and hand down at once."""
    return not (own / "cgroup.type").exists()


def _writable(own: Path) -> bool:
    return all(os.access(own / name, os.W_OK) for name in ("", "cgroup.procs", "cgroup.subtree_control"))


def _move_to(folder: Path) -> None:
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def _hand_down(own: Path, found: frozenset[str]) -> None:
    (own / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(found)))
