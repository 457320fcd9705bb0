"""A place beside a workspace in which an install can fail without a trace.

The trial sees the environment of the workspace, lying over it as one more layer, and nothing else of it: code that
packages bring is shown none of the agent's files, and what it writes elsewhere than in the environment is dropped.
Where there are no layers, the environment is copied.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from skep.errors import StorageFull, WorkspaceBusy
from skep.sandbox.census import Census, Usage
from skep.sandbox.claim import claim
from skep.sandbox.erase import erase
from skep.sandbox.limits import GIB, Limits
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Stack
from skep.workspace.faults import explained, in_thread
from skep.workspace.held import Held
from skep.workspace.layers.copying import Copying
from skep.workspace.layers.overlay import pierce
from skep.workspace.layers.sight import Sight
from skep.workspace.packages.declared import PACKAGE_JSON, PACKAGE_LOCK, PYPROJECT
from skep.workspace.packages.view import Glimpse
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.installer import Installer, Journal
from skep.workspace.snapshot.package_cache import VIEW, PackageCache
from skep.workspace.snapshot.toolchain import NODE_HOME, uv_shown

FOLDER = "install"
PYTHON_HOME = ".venv"
MODULES = "node_modules"
#: What an install may change, and what it sees besides.
CHANGED = (PYTHON_HOME, MODULES, PYPROJECT, PACKAGE_JSON, PACKAGE_LOCK)
_SEEN = (*CHANGED, NODE_HOME.rpartition("/")[2])
_OWN_CACHE = "/cache/packages"


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial: the folder it writes to, and the stacks without it and with it."""

    folder: Path
    older: tuple[str, ...]
    layered: bool

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def newer(self) -> tuple[str, ...]:
        return (str(self.tree), *self.older) if self.layered else (str(self.tree),)

    @property
    def stack(self) -> Stack:
        return Stack(str(self.tree), str(self.folder / "work"), self.older if self.layered else ())

    @classmethod
    def of(cls, held: Held, older: Sequence[str] | None = None) -> Trial:
        """Describe the trial of a workspace, over what it shows now or over other layers."""
        layers = older if older is not None else layers_of(held)
        return cls(held.folder / FOLDER, tuple(layers), held.grounds.layering == "overlay")

    def begin(self, *, bare: bool = False) -> None:
        """Make the folder; `WorkspaceBusy` if there is a trial already. `bare` shows nothing of what lies below."""
        with explained(str(self.folder)):
            try:
                self.folder.mkdir(mode=0o700)
            except FileExistsError:
                raise WorkspaceBusy(
                    f"another install is under way in workspace {self.folder.parent.name}", hint="wait until it ends"
                ) from None
            try:
                self._furnish(bare=bare)
            except BaseException:
                self.end()
                raise

    def end(self) -> None:
        """Remove it."""
        with suppress(OSError):  # what stays is removed when the workspace is held again
            erase(str(self.folder), self.folder.lstat().st_ino)

    def _furnish(self, *, bare: bool) -> None:
        self.tree.mkdir(mode=0o700)
        fd, owner = claim(str(self.tree))
        try:
            seen = () if bare else _SEEN
            if self.layered:
                _hide(fd, self.older, seen)
            else:
                for name in seen:
                    _copy(self.tree, self.older, name, owner)
        finally:
            os.close(fd)


def _hide(folder: int, layers: Sequence[str], seen: Collection[str]) -> None:
    with closing(Sight(layers)) as sight:
        for name, holders in sight.listing().items():
            if name not in seen and sight.kind(name, holders[0]) != "whiteout":
                pierce(folder, name)


def _copy(tree: Path, layers: Sequence[str], name: str, owner: tuple[int, int] | None) -> None:
    """Copy one name of a plain folder; what is not a file or a folder is left out."""
    with closing(Glimpse(layers, (name,))) as sight:
        found = sight.find(name, 0) if name in sight.listing() else None
        if found is None or found.kind not in ("file", "folder"):
            return
        source = sight.cursors[0]
        if found.kind == "folder":
            source.down(name)
            (tree / name).mkdir(mode=0o700)
            # By descriptor: the name could lead elsewhere by now.
            Copying(tree / name, owner).run([f"/proc/self/fd/{source.fd}"], over=())
            if owner is not None:
                os.chown(tree / name, *owner)
            return
        with os.fdopen(source.open(name), "rb") as file:
            (tree / name).write_bytes(file.read())
        if owner is not None:
            os.chown(tree / name, *owner)


def layers_of(held: Held) -> tuple[str, ...]:
    """Return the folders that a workspace is made of, the one that is written first."""
    stack = held.grounds.stack(held.manifest)
    return (stack.upper, *stack.layers)


@dataclass(frozen=True, slots=True)
class Tools:
    """uv and npm in the sandbox of a trial, and whether they have to do with what is in the cache."""

    installer: Installer
    offline: bool


@asynccontextmanager
async def trying(
    trial: Trial, held: Held, *, cache: PackageCache, indexes: Indexes, journal: Journal, network: bool
) -> AsyncIterator[Tools]:
    """Run uv and npm in a trial. Only who cannot do without it gets a way to the package indexes."""
    mounts = await cache.view()
    offline = bool(mounts) and not network
    create = Sandbox.create(
        stack=trial.stack,
        limits=await in_thread(_limits, trial, held),
        network=None if offline else indexes.network(),
        read_only=uv_shown(),
        mounts=mounts,
    )
    async with cache.locked(), create as sandbox:
        installer = Installer(sandbox, at=VIEW if mounts else _OWN_CACHE, indexes=indexes, journal=journal)
        yield Tools(installer, offline)


def room_in(held: Held) -> Usage:
    """Say how much room is left in a workspace."""
    limits = held.grounds.limits_for(held.manifest)
    used = count(held.grounds.stack(held.manifest).upper)
    return Usage(limits.disk_bytes - used.size, limits.inodes - used.inodes)


def count(folder: str) -> Usage:
    """Count what a folder holds."""
    with explained(folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return Census.take(fd)
        finally:
            os.close(fd)


def _limits(trial: Trial, held: Held) -> Limits:
    """Give a trial the room that is left in the workspace, beside what it holds already."""
    room = room_in(held)
    if room.size <= 0 or room.inodes <= 0:
        raise StorageFull(
            f"workspace {held.id} has used up its room", hint="remove files, or raise the template's disk_mb"
        )
    room += count(str(trial.tree))
    limits = replace(held.grounds.limits, disk_bytes=room.size, inodes=room.inodes)
    return replace(limits, tmp_bytes=2 * GIB, cache_bytes=2 * GIB, command_s=1800.0, command_cap_s=3600.0)
