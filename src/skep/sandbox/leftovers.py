"""Clean up after controllers that died: what they left is known by identity, never by name.

Each sandbox has a record, a file that its controller holds locked for as long as it lives. A record that can be
locked has no controller any more, whatever its process id was; what it lists is removed if it still is the very
folder (by inode) that was listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from skep.errors import SandboxUnusable
from skep.sandbox.cgroups import Group


@dataclass(slots=True)
class Record:
    """The locked list of what one sandbox holds on the host."""

    path: Path
    fd: int
    throwaway: Path | None = None

    @classmethod
    def write(cls, sandbox_id: str, group: Group) -> Record:
        path = records_folder() / f"{sandbox_id}.json"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        record = cls(path, fd)
        record.note(group, None)
        return record

    def note(self, group: Group, throwaway: Path | None) -> None:
        """List what the sandbox holds. Written in one call: a reader sees the old list or the new."""
        self.throwaway = throwaway
        content = {
            "way": group.way,
            "groups": {name: list(folder) for name, folder in group.folders.items()},
            "throwaway": [str(throwaway), throwaway.stat().st_ino] if throwaway else None,
        }
        # Padded, so that a shorter list leaves nothing of a longer one behind.
        os.pwrite(self.fd, json.dumps(content).encode().ljust(2048), 0)

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self.fd)


def records_folder() -> Path:
    """Return the folder of this user's records, made private on first use."""
    uid = os.geteuid()
    runtime = Path("/run") if uid == 0 else Path("/run/user") / str(uid)
    # Without a runtime folder of the user's own the common one serves: it is checked, so nobody can plant it.
    folder = runtime / "skep" if os.access(runtime, os.W_OK) else Path("/tmp") / f"skep-{uid}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise SandboxUnusable(f"{folder} is not a private folder of this user", hint=f"remove {folder} and try again")
    return folder


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
    """Remove what a record lists; False while something of it is still busy."""
    text = os.pread(fd, 1 << 16, 0)
    if not text:
        return True
    content = json.loads(text)
    group = Group(content["way"], {name: (folder, inode) for name, (folder, inode) in content["groups"].items()})
    group.kill()
    gone = group.remove(wait_s=1.0)
    if content["throwaway"] is not None:
        folder, inode = content["throwaway"]
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(folder).st_ino == inode:
                shutil.rmtree(folder, ignore_errors=True)
    return gone
