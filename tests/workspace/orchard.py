"""A home with a built snapshot of a small template, and a market to install more from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.workspace.market import Market, running_market
from tests.workspace.workbench import opened, template

from skep.sandbox.erase import erase
from skep.sandbox.sandbox import Sandbox
from skep.workspace.grounds import Layering
from skep.workspace.health.finding import Report
from skep.workspace.health.health import examine
from skep.workspace.health.repair import Repaired, repair
from skep.workspace.packages.packages import Installed, acts, install, settle
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.workspace import Workspace
from skep.workspace.workspaces import Workspaces

TEMPLATE = "orchard"
SITE = ".venv/lib/python3.*/site-packages"
#: What an agent has made, of every kind that could be lost.
AGENTS_FILES = (
    "mkdir -p src/deep .config; echo mine > note; echo 1 > src/deep/one; ln -s note link; chmod 600 note;"
    " echo '[ui]' > .config/tool; head -c 100000 /dev/zero > data"
)
#: One hash over everything in the workspace but the environments and the files that declare them.
_OWN = r"""
import hashlib, os, re
digest = hashlib.sha256()
skipped = re.compile(r"\.venv|node_modules|(pyproject\.toml|package(-lock)?\.json)(\.broken.*)?")
for folder, folders, files in os.walk("/workspace"):
    if folder == "/workspace":
        folders[:] = [name for name in folders if not skipped.fullmatch(name)]
        files = [name for name in files if not skipped.fullmatch(name)]
    folders.sort()
    for name in sorted(folders + files):
        path = os.path.join(folder, name)
        digest.update(f"{path}\0{os.lstat(path).st_mode}\0".encode())
        digest.update(os.readlink(path).encode() if os.path.islink(path) else b"")
        digest.update(open(path, "rb").read() if os.path.isfile(path) and not os.path.islink(path) else b"")
print(digest.hexdigest())
"""
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Orchard:
    """The home, with what tests do in it."""

    home: Path
    market: Market
    snapshots: Snapshots
    #: Workspaces with packages in them, by the way in which they are put together.
    _ripe: dict[str, str] = field(default_factory=dict)

    def workspaces(self, layering: Layering | None = None, **options: Any) -> Workspaces:
        more = acts(self.snapshots.indexes, self.snapshots.cache)
        return Workspaces(self.home, self.snapshots, layering=layering, settle=[settle], acts=more, **options)

    @asynccontextmanager
    async def workspace(self, layering: Layering | None = None, **options: Any) -> AsyncIterator[Workspace]:
        """Make a workspace with some of an agent's files in it, and hold it."""
        workspaces = self.workspaces(layering, **options)
        workspace_id = await self.planted(workspaces)
        async with workspaces.hold(workspace_id) as workspace:
            yield workspace

    async def planted(self, workspaces: Workspaces) -> str:
        """Make a workspace with some of an agent's files in it, and return its id."""
        workspace_id = f"tree-{next(_numbers)}"
        await workspaces.create(workspace_id, template=TEMPLATE)
        async with workspaces.enter(workspace_id) as sandbox:
            assert (await sandbox.run(AGENTS_FILES)).ok
        return workspace_id

    async def ripe(self, workspaces: Workspaces) -> str:
        """Make a workspace in which `pear` is installed for Python and Node, and return its id."""
        layering = (await workspaces.grounds()).layering
        if layering not in self._ripe:
            source = await self.planted(workspaces)
            await self.install_into(workspaces, source, python=["pear"], node=["pear"])
            self._ripe[layering] = source
        (made,) = await workspaces.fork(self._ripe[layering], [f"tree-{next(_numbers)}"])
        return made.id

    async def install(self, workspace: Workspace, *, python: Sequence[str] = (), node: Sequence[str] = ()) -> Installed:
        source = self.snapshots
        return await install(workspace, python=python, node=node, indexes=source.indexes, cache=source.cache)

    async def install_into(
        self, workspaces: Workspaces, workspace_id: str, *, python: Sequence[str] = (), node: Sequence[str] = ()
    ) -> None:
        async with workspaces.hold(workspace_id) as workspace:
            await self.install(workspace, python=python, node=node)

    async def examine(self, workspaces: Workspaces, workspace_id: str, *, thorough: bool = False) -> Report:
        return await examine(workspaces, workspace_id, thorough=thorough)

    async def repair(self, workspaces: Workspaces, workspace_id: str) -> Repaired:
        source = self.snapshots
        return await repair(workspaces, workspace_id, indexes=source.indexes, cache=source.cache)


@contextmanager
def growing(folder: Path) -> Iterator[Orchard]:
    """Build the template's snapshot once, for any number of workspaces."""
    home = folder / "home"
    home.mkdir(mode=0o700)
    with running_market() as market:
        snapshots = opened(home, market)
        template(home, TEMPLATE, python={"dependencies": ["tinypkg"]}, nodejs={"dependencies": ["tinypkg"]})
        asyncio.run(snapshots.build(TEMPLATE))
        try:
            yield Orchard(home, market, snapshots)
        finally:
            erase(str(home), home.stat().st_ino)


async def own_hash(sandbox: Sandbox) -> str:
    """Return one hash over the agent's own files."""
    ran = await sandbox.run(["/usr/bin/python3", "-I", "-S", "-c", _OWN])
    assert ran.ok, ran.error_text
    return ran.text.strip()


async def said(sandbox: Sandbox, command: str) -> str:
    """Return what a command prints, which has to succeed."""
    ran = await sandbox.run(command)
    assert ran.ok, ran.text + ran.error_text
    return ran.text
