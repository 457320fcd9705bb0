"""Clean up after controllers that died: what they left is known by identity, never by name.

Each sandbox has a record, a file that its controller holds locked for as long as it lives. A record that can be
locked has no controller any more, whatever its process id was; what it lists is removed if it still is the very
folder (by inode) that was listed. A folder is listed before it is made, so that no moment is left out; then its inode
is not known yet, and it is removed only if there is nothing in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from skep.errors import SandboxUnusable
from skep.sandbox.cgroups import Group
from skep.sandbox.erase import erase


@dataclass(slots=True)
class Record:
    """The locked list of what one sandbox holds on the host."""

    path: Path
    fd: int
    #: The workspace to throw away at the end; the inode is 0 until the folder is made.
    throwaway: tuple[str, int] | None = None

    @classmethod
    def open(cls, sandbox_id: str) -> Record:
        """Make an empty record, locked."""
        path = records_folder() / f"{sandbox_id}.json"
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return cls(path, fd)
            os.close(fd)  # somebody who swept between the two calls took it for a dead one

    def note(self, group: Group, throwaway: tuple[str, int] | None) -> None:
        """List what the sandbox holds. Written in one call: a reader sees the old list or the new."""
        self.throwaway = throwaway
        content = {
            "way": group.way,
            "groups": {name: list(folder) for name, folder in group.folders.items()},
            "throwaway": throwaway,
        }
        # Padded, so that a shorter list leaves nothing of a longer one behind.
        os.pwrite(self.fd, json.dumps(content).encode().ljust(2048), 0)

    @property
    def planned_throwaway(self) -> str | None:
        return self.throwaway[0] if self.throwaway else None

    def settle(self, group: Group, *, wait_s: float) -> None:
        """Remove what the record lists, and the record; it stays for the next sweep if something would not go."""
        if _removed(group, self.throwaway, wait_s=wait_s):
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        self.close()

    def close(self) -> None:
        os.close(self.fd)


def records_folder() -> Path:
    """Return the folder of this user's records, made private on first use."""
    uid = os.geteuid()
    runtime = Path("/run") if uid == 0 else Path("/run/user") / str(uid)
    # Without a runtime folder of the user's own the common one serves: it is checked, so nobody can plant it.
    folder = runtime / "skep" if os.access(runtime, os.W_OK) else Path("/tmp") / f"skep-{uid}"
    try:
        found = folder.lstat()
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise SandboxUnusable(f"{folder} is not a private folder of this user", hint=f"remove {folder} and try again")
    return folder


@cache
def sweep_once() -> threading.Thread:
    """Sweep in the background, the first time this process asks; nobody waits for it."""
    thread = threading.Thread(target=sweep, name="skep-sweep", daemon=True)
    thread.start()
    return thread


def sweep() -> list[str]:
    """Remove what dead controllers left behind; return the ids of their sandboxes."""
    swept = []
    for path in sorted(records_folder().glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _orphaned(fd) and _clean(fd):
                    path.unlink()
                    swept.append(path.stem)
            finally:
                os.close(fd)
    return swept


def _orphaned(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _clean(fd: int) -> bool:
    """Remove what a record lists; False while something of it is still busy, or if the record cannot be read."""
    text = os.pread(fd, 1 << 16, 0)
    if not text:
        return True
    try:
        content = json.loads(text)
        group = Group(content["way"], {name: (folder, inode) for name, (folder, inode) in content["groups"].items()})
        throwaway = content["throwaway"] and (str(content["throwaway"][0]), int(content["throwaway"][1]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False  # a record that was cut short says nothing for certain: it is left as it is
    group.kill()
    return _removed(group, throwaway, wait_s=1.0)


def _removed(group: Group, throwaway: tuple[str, int] | None, *, wait_s: float) -> bool:
    gone = group.remove(wait_s=wait_s)
    if throwaway is not None:
        try:
            _throw_away(*throwaway)
        except OSError:
            return False
    return gone


def _throw_away(folder: str, inode: int) -> None:
    if inode:
        erase(folder, inode)
    else:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
