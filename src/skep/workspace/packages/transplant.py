"""Bring a part of a workspace to what another stack shows, from inside the sandbox that runs over it.

Only from inside may an overlay be changed while it is mounted. What is new is first unpacked beside the files, which
is where a full disk is noticed; then everything takes its place by renaming. Done again after it was cut short, it
does what is left to do.
"""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import shlex
import stat
import tarfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skep.errors import StorageFull, WorkspaceDamaged
from skep.sandbox.census import Usage
from skep.sandbox.sandbox import Process, Sandbox, Stream
from skep.workspace.faults import in_thread
from skep.workspace.grounds import Phase
from skep.workspace.layers.comparison import Change, Comparison
from skep.workspace.layers.overlay import opened
from skep.workspace.layers.sight import Entry
from skep.workspace.packages.view import Glimpse

#: Begins the name of the folder in /workspace in which what is new waits for its place.
STAGE = ".skep-stage-"
_PATH = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
_AT_ONCE = 200
_DEADLINE_S = 1800.0
_KEEP_BYTES = 2000


@dataclass(slots=True)
class Graft:
    """What has to be done so that one stack shows what another does, at some names of the uppermost folder."""

    doomed: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    #: The uppermost of the entries: the others come with them.
    moves: list[str] = field(default_factory=list)
    modes: list[Entry] = field(default_factory=list)

    @classmethod
    def between(cls, newer: Sequence[str], older: Sequence[str], names: Collection[str]) -> Graft:
        """Compare two stacks at some names."""
        graft = cls()
        with closing(Glimpse(older, names)) as before, closing(Glimpse(newer, names)) as after:
            for change in Comparison(before, after):
                graft._take(change)
        return graft

    def _take(self, change: Change) -> None:
        before, after = change.before, change.after
        if before is not None and (after is None or _is_another(before, after)):
            _add_topmost(self.doomed, change.path)
        if after is None or after.kind == "other":
            return
        if before is not None and before.kind == after.kind == "folder":
            self.modes.append(after)
            return
        self.entries.append(after)
        _add_topmost(self.moves, change.path)

    @property
    def empty(self) -> bool:
        return not (self.doomed or self.entries or self.modes)

    @property
    def weight(self) -> Usage:
        """The room that what is new takes."""
        return Usage(sum(entry.stat.st_blocks * 512 for entry in self.entries), len(self.entries))

    def script(self, stage: str) -> str:
        """Write the commands that put everything in its place, from /workspace."""
        tops = dict.fromkeys(path.partition("/")[0] for path in (*self.doomed, *self.moves))
        # A folder that its owner has shut to itself would stop everything halfway.
        lines = [f"find ./{shlex.quote(name)} -type d ! -perm -700 -exec chmod u+rwx {{}} \\;" for name in tops]
        lines = [f"{line} 2> /dev/null || :" for line in lines]
        lines += ["set -e", *(_line("rm -rf --", some) for some in _chunks(self.doomed))]
        places: dict[str, list[str]] = {}
        for path in self.moves:
            places.setdefault(path.rpartition("/")[0] or ".", []).append(f"{stage}/new/{path}")
        for place, sources in places.items():
            lines += [_line(f"mv -f -t {shlex.quote(place)} --", some) for some in _chunks(sources)]
        lines += [_line(f"chmod {stat.S_IMODE(entry.stat.st_mode) & 0o777:o} --", [entry.path]) for entry in self.modes]
        return "\n".join(lines) + "\n"

    def pack(self, into: Any, stage: str) -> None:
        """Write an archive of what is new, and the script that places it."""
        with tarfile.open(fileobj=into, mode="w|", format=tarfile.GNU_FORMAT, bufsize=1 << 18) as archive:
            script = os.fsencode(self.script(stage))
            head = tarfile.TarInfo("place")
            head.size = len(script)
            archive.addfile(head, io.BytesIO(script))
            for entry in self.entries:
                _pack(archive, entry)


def _is_another(before: Entry, after: Entry) -> bool:
    """Say whether one cannot take the other's place by renaming."""
    return before.kind != after.kind and "folder" in (before.kind, after.kind)


def _add_topmost(paths: list[str], path: str) -> None:
    """Add a path unless it is below the last one: what is below a folder comes right after it."""
    if not paths or not path.startswith(f"{paths[-1]}/"):
        paths.append(path)


def _chunks(words: Sequence[str]) -> Iterable[Sequence[str]]:
    return (words[start : start + _AT_ONCE] for start in range(0, len(words), _AT_ONCE))


def _line(command: str, words: Sequence[str]) -> str:
    return " ".join([command, *map(shlex.quote, words)])


def _pack(archive: tarfile.TarFile, entry: Entry) -> None:
    member = tarfile.TarInfo(f"new/{entry.path}")
    member.mode = stat.S_IMODE(entry.stat.st_mode) & 0o777
    member.mtime = int(entry.stat.st_mtime)  # compiled Python is known by the time of its source
    if entry.kind == "folder":
        member.type = tarfile.DIRTYPE
        member.mode |= 0o700
        archive.addfile(member)
    elif entry.kind == "link":
        member.type, member.linkname = tarfile.SYMTYPE, str(Path(entry.host).readlink())
        archive.addfile(member)
    else:
        with os.fdopen(opened(entry), "rb") as file:
            member.size = os.fstat(file.fileno()).st_size
            archive.addfile(member, file)


async def transplant(
    sandbox: Sandbox,
    newer: Sequence[str],
    older: Sequence[str],
    names: Collection[str],
    *,
    room: Usage,
    on_phase: Phase,
) -> Usage:
    """Make the workspace of a sandbox, which shows `older`, show what `newer` does at some names.

    Returns what it took. When that is more than `room`, nothing has changed; after any other failure it may be
    repeated.
    """
    graft = await in_thread(Graft.between, newer, older, names)
    if graft.empty:
        return Usage(0, 0)
    if graft.weight.size > room.size or graft.weight.inodes > room.inodes:
        raise no_room()
    stage = f"{STAGE}{secrets.token_hex(4)}"
    try:
        await _stage(sandbox, graft, stage)
        on_phase("staged")
        placed = await sandbox.run(["/bin/sh", f"{stage}/place"], env=_PATH, timeout_s=sandbox.limits.command_cap_s)
        if not placed.ok:
            raise _unplaced(placed.error_text)
        on_phase("placed")
    finally:
        await sweep(sandbox, [stage])
    return graft.weight


async def sweep(sandbox: Sandbox, stages: Sequence[str]) -> None:
    """Remove what was staged. It may have folders that are shut."""
    if stages:
        words = ["/bin/sh", "-c", 'chmod -R u+rwX "$@" 2> /dev/null; rm -rf -- "$@"', "sweep", *stages]
        await sandbox.run(words, env=_PATH, timeout_s=sandbox.limits.command_cap_s)


async def _stage(sandbox: Sandbox, graft: Graft, stage: str) -> None:
    words = 'mkdir -m 700 "$0" && exec tar -x -p --no-same-owner -f - -C "$0"'
    process = await sandbox.start(["/bin/sh", "-c", words, stage], env=_PATH, stdin=True)
    try:
        async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as group:
            said = group.create_task(_said(process.stderr))
            group.create_task(_said(process.stdout))
            await in_thread(graft.pack, _Inlet(process, asyncio.get_running_loop()), stage)
            await process.close_stdin()
        ended = await process.wait()
    except BaseException:
        await process.kill()
        raise
    finally:
        process.release()
    if ended.code != 0:
        full = ended.limit == "disk" or "No space left" in said.result() or "quota exceeded" in said.result()
        raise no_room() if full else _unplaced(said.result())


async def _said(stream: Stream) -> str:
    kept = b""
    async for chunk in stream:
        kept = (kept + chunk)[-_KEEP_BYTES:]
    return kept.decode(errors="replace")


def no_room() -> StorageFull:
    return StorageFull("there is no room left in the workspace", hint="remove files, or raise the template's disk_mb")


def _unplaced(said: str) -> WorkspaceDamaged:
    reason = said.strip().rpartition("\n")[2] or "it gave no reason"
    return WorkspaceDamaged(
        f"the files cannot be put in their place: {reason}", hint="`skep workspace repair` does what is left to do"
    )


class _Inlet(io.RawIOBase):
    """The standard input of a process as a file, for a thread to write to."""

    def __init__(self, process: Process, loop: asyncio.AbstractEventLoop) -> None:
        self._process = process
        self._loop = loop

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        asyncio.run_coroutine_threadsafe(self._process.write(bytes(data)), self._loop).result(_DEADLINE_S)
        return len(data)
