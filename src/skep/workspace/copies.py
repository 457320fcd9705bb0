"""Folders of the host that a sandbox cannot show, because what holds it mounts nothing: it gets copies of them.

What is done to a copy stays in the workspace, and the next sandbox gets a fresh one. Everything is written through the
sandbox itself, so that a link that an agent has planted there leads nowhere but to its own files.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from skep.errors import Denied, InvalidRequest, LimitReached, NotFound
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount
from skep.workspace.faults import in_thread

#: More than a hive's memory and skills ever are.
_MOST_FILES = 5_000
_MOST_BYTES = 64 << 20


async def copy_in(sandbox: Sandbox, mounts: Sequence[Mount]) -> None:
    """Put copies of folders, of which none is to be written, where they would be shown; outer ones first."""
    for mount in sorted(mounts, key=lambda one: one.inside.count("/")):
        files = await in_thread(_files, mount.host)
        await _clear(sandbox, mount.inside)
        await sandbox.files.mkdir(mount.inside)
        for name, data in files.items():
            await sandbox.files.write(f"{mount.inside}/{name}", data, mode=0o444)


async def _clear(sandbox: Sandbox, path: str) -> None:
    """Make room; what an agent has shut against removal, or left there as another user, is put aside."""
    try:
        await sandbox.files.remove(path, recursive=True)
    except NotFound:
        return
    except (Denied, InvalidRequest):
        await sandbox.files.move(path, f"{path}.{secrets.token_hex(4)}.aside")


def _files(folder: str) -> dict[str, bytes]:
    found, size = {}, 0
    for path in _walk(Path(folder)):
        found[str(path.relative_to(folder))] = data = path.read_bytes()
        size += len(data)
        if len(found) > _MOST_FILES or size > _MOST_BYTES:
            raise LimitReached(
                f"{folder} holds too much to be copied into a sandbox",
                hint="use a mechanism that can show folders, such as bubblewrap",
            )
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(place, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path
