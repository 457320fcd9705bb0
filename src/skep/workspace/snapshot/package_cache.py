"""Packages that all workspaces share, fetched once, and changed by nobody who could mean harm.

Only a fetch writes to the cache, and a fetch runs uv and npm themselves and nothing that they bring: no build, no
script. Builds and workspaces see the cache through a scratch mount: they may write, and it is thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from skep.errors import TemplateInvalid
from skep.sandbox.egress.network import Network
from skep.sandbox.layering import layering
from skep.sandbox.limits import GIB, Limits
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount
from skep.workspace.faults import explained
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.installer import Installer, Journal
from skep.workspace.snapshot.resolution import Artifact, Resolution
from skep.workspace.snapshot.toolchain import NODE_PACKAGE, Node, uv_shown
from skep.workspace.snapshot.turn import turn

#: Where the cache is seen by those who do not write it.
VIEW = "/opt/skep/packages"
#: Downloads are large, and few: what bounds them is the disk.
_LIMITS = Limits(
    disk_bytes=200 * GIB,
    inodes=20_000_000,
    cache_bytes=2 * GIB,
    tmp_bytes=2 * GIB,
    command_s=1800,
    command_cap_s=3600,
    processes=1024,
)


@dataclass(frozen=True, slots=True)
class PackageCache:
    """The shared cache of uv and npm, below `folder`."""

    folder: Path
    #: None to find out whether this kernel has overlays.
    layering: Literal["overlay", "none"] | None = None

    @property
    def store(self) -> Path:
        return self.folder / "cache"

    async def view(self) -> tuple[Mount, ...]:
        """Return the mount by which a sandbox uses the cache without being able to change it.

        Where the kernel has no overlays there is none: packages are downloaded again.
        """
        if (self.layering or await asyncio.to_thread(layering)) == "none":
            return ()
        with explained(str(self.store)):
            self.store.mkdir(mode=0o700, parents=True, exist_ok=True)
        return (Mount(str(self.store), VIEW, "scratch"),)

    async def prune(self) -> None:
        """Remove what can no longer be used, left-overs of killed fetches too."""
        if self.store.exists():
            async with self.locked(alone=True), _writing(self, None) as sandbox:
                await Installer(sandbox, at="/workspace").prune()

    @asynccontextmanager
    async def locked(self, *, alone: bool = False) -> AsyncIterator[None]:
        """Keep the cache from being pruned; `alone`, to prune it."""
        with explained(str(self.store)):
            self.store.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with turn(self.folder / "lock", alone=alone):
            yield


async def fetch(
    cache: PackageCache,
    indexes: Indexes,
    *,
    python: Sequence[str] = (),
    node: Sequence[str] = (),
    interpreter: str = "/usr/bin/python3",
    npm: Node | None = None,
    journal: Journal | None = None,
    needed: Callable[[Resolution], bool] = lambda _: True,
) -> Resolution:
    """Choose versions of packages that go together and, if they are `needed`, bring their files into the cache.

    A package that exists as source only is resolved apart, in a sandbox that cannot change the cache, since to learn
    what it needs its code may have to run; it is not kept. The same goes for npm when Node itself is a package.
    """
    journal, npm = journal or Journal(), npm or Node(None)
    if not python and not node and npm.wheel is None:
        return Resolution()
    async with cache.locked(), _writing(cache, indexes.network()) as sandbox:
        installer = Installer(sandbox, at="/workspace", indexes=indexes, journal=journal)
        chosen = await _choose(installer, cache, python=python, node=node, interpreter=interpreter, npm=npm)
        if needed(chosen):
            journal.tell("fetching packages")
            tool = (chosen.node,) if chosen.node else ()
            await installer.download_python((*chosen.python, *tool), interpreter)
            if npm.wheel is None:
                await installer.download_node(chosen, npm)
    return chosen


async def _choose(
    installer: Installer,
    cache: PackageCache,
    *,
    python: Sequence[str],
    node: Sequence[str],
    interpreter: str,
    npm: Node,
) -> Resolution:
    installer.journal.tell("choosing versions")
    chosen = await installer.resolve_python(python, interpreter, build=False)
    if chosen is None:
        async with trial(cache, installer.indexes, journal=installer.journal) as other:
            chosen = await other.resolve_python(python, interpreter, build=True)
    if npm.wheel is None:
        return Resolution(chosen or (), await installer.resolve_node(node, npm))
    tool = await _runtime(installer, npm.wheel, interpreter)
    if not node:
        return Resolution(chosen or (), b"", tool)
    await installer.download_python((tool,), interpreter)
    async with trial(cache, installer.indexes, journal=installer.journal) as other:
        await other.place_node(tool, interpreter)
        return Resolution(chosen or (), await other.resolve_node(node, npm), tool)


async def _runtime(installer: Installer, wheel: str, interpreter: str) -> Artifact:
    """Choose a Node that this machine does not have."""
    found = await installer.resolve_python([wheel], interpreter, build=False)
    if not found:
        wanted = wheel.removeprefix(NODE_PACKAGE) or "any"
        raise TemplateInvalid(
            f"no Node fits ({wanted}): not on this machine, and not on the package index as {NODE_PACKAGE}",
            hint="change nodejs.version in the template, or install that Node below /usr",
        )
    return found[0]


@asynccontextmanager
async def trial(cache: PackageCache, indexes: Indexes, *, journal: Journal) -> AsyncIterator[Installer]:
    """Give an installer in a sandbox that is thrown away, and that cannot change the cache."""
    mounts = await cache.view()
    create = Sandbox.create(limits=_LIMITS, network=indexes.network(), read_only=uv_shown(), mounts=mounts)
    async with create as sandbox:
        yield Installer(sandbox, at=VIEW if mounts else "/workspace/.packages", indexes=indexes, journal=journal)


@asynccontextmanager
async def _writing(cache: PackageCache, network: Network | None) -> AsyncIterator[Sandbox]:
    """Open the sandbox that may write the cache, which is its workspace."""
    create = Sandbox.create(cache.store, limits=_LIMITS, network=network, read_only=uv_shown(), adopt=True)
    async with create as sandbox:
        yield sandbox
