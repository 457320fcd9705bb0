"""The workspaces of one home: make them, hold them, copy them, do away with them."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skep.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    SandboxLost,
    Unavailable,
    WorkspaceBusy,
    WorkspaceDamaged,
)
from skep.sandbox.egress.network import Network
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount
from skep.workspace import making
from skep.workspace import manifest as manifests
from skep.workspace.acts import ACTS, Act
from skep.workspace.diff import Diff
from skep.workspace.door import Answer, Door, NobodyHome, call
from skep.workspace.faults import explained, in_thread, whole
from skep.workspace.forking import fork
from skep.workspace.grounds import LOCK, Grounds, Layering, Phase
from skep.workspace.held import Choose, Outfit, Reach, by_bubblewrap, by_itself, pinned
from skep.workspace.holding import Holding, Taken, alone
from skep.workspace.layers.trees import Trees
from skep.workspace.manifest import Checkpoint, Manifest, Shown, State
from skep.workspace.register import Census, Register
from skep.workspace.snapshot.snapshot import Snapshot
from skep.workspace.workspace import START, Workspace

if TYPE_CHECKING:
    from skep.workspace.snapshot.snapshots import Snapshots

Manifests = list[Manifest]
Ids = list[str]
Settle = Callable[[Workspace], Awaitable[None]]

#: How long a workspace is tried that is between two holders.
_PATIENCE_S = 30.0
_PAUSE_S = 0.02


def _ignore(_: str) -> None:
    pass


class Workspaces:
    """Every workspace below one home.

    `layering` is found out by trying unless it is given. `settle` is called for each workspace that is taken hold of,
    to finish or undo what a crash left in the middle. `acts` are more things that a holder does when another process
    asks. `choose` says what holds each sandbox, and `reach` how a cloud is reached that has files. `on_phase` is told
    of each step of a change as it is done.
    """

    def __init__(
        self,
        home: Path,
        snapshots: Snapshots,
        *,
        limits: Limits | None = None,
        layering: Layering | None = None,
        settle: Sequence[Settle] = (),
        acts: Mapping[str, Act] | None = None,
        choose: Choose = by_bubblewrap,
        reach: Reach = by_itself,
        on_phase: Phase = _ignore,
    ) -> None:
        self.home = home
        self.trees = Trees(home / "trees")
        self.register = Register(home / "workspaces", self.trees)
        self._snapshots = snapshots
        self._limits = limits or Limits()
        self._layering = layering
        self._settle = settle
        self._acts = {**ACTS, "fork": self._fork, **(acts or {})}
        self._choose = choose
        self._reach = reach
        self._on_phase = on_phase

    @classmethod
    def at(
        cls, home: str | os.PathLike[str], *, limits: Limits | None = None, choose: Choose = by_bubblewrap
    ) -> Workspaces:
        """Open the workspaces below a folder, with the templates that ship with Skep and those in the folder."""
        from skep.workspace.snapshot.snapshots import Snapshots
        from skep.workspace.template.templates import Templates

        place = Path(home).absolute()
        return cls(place, Snapshots(place, Templates(place / "templates")), limits=limits, choose=choose)

    async def create(
        self,
        workspace_id: str,
        *,
        template: str = "minimal",
        snapshot: Snapshot | None = None,
        shown: Sequence[Mount] = (),
        labels: Mapping[str, str] | None = None,
        on_progress: Callable[[str], None] = _ignore,
    ) -> Manifest:
        """Make a workspace over a snapshot, by default the latest of the template, which is built if there is none.

        A plain folder of that name becomes the workspace, with its files. `shown` are folders of the host that every
        sandbox over it shows; `labels` say whose it is. One that was left half-made is made again; one that is there
        is `Conflict`.
        """
        condition = self.register.condition(workspace_id)
        if condition == "ready":
            raise Conflict(f"there is a workspace {workspace_id} already", hint="choose another id")
        grounds = await self.grounds()
        snapshot = snapshot or await self._snapshots.ready(template, on_progress)
        copies = grounds.layering == "copy"
        # Where there can be no layers, a plain folder and the snapshot are put together by whoever first holds it.
        below = State(based=not copies or condition == "plain", snapshot_version=snapshot.version)
        manifest = making.born(workspace_id, snapshot.template, below)
        places = tuple(Shown(host=mount.host, inside=mount.inside, mode=mount.mode) for mount in shown)
        manifest = manifest.model_copy(update={"shown": places, "labels": dict(labels or {})})
        with pinned(snapshot):
            if condition == "plain":
                return await in_thread(self._adopt, grounds, manifest)
            return await whole(self._make(grounds, manifest, [str(snapshot.tree)] if copies else None))

    async def _make(self, grounds: Grounds, manifest: Manifest, copy_of: list[str] | None) -> Manifest:
        async with grounds.referring():
            holding = await in_thread(making.begin, self.register, manifest.id)
            try:
                await in_thread(making.make, grounds, self.register, holding, manifest, copy_of=copy_of)
            finally:
                holding.close()
        return manifest

    def _adopt(self, grounds: Grounds, manifest: Manifest) -> Manifest:
        with alone(self.register.folder / LOCK):
            if self.register.condition(manifest.id) != "plain":
                raise Conflict(f"there is a workspace {manifest.id} already", hint="choose another id")
            return making.adopt(grounds, self.register, manifest)

    def list(self) -> Manifests:
        """Return the manifests of all workspaces that are whole, by id; `census` tells of the others."""
        return list(self.census().manifests.values())

    def census(self) -> Census:
        """Look at every workspace: which can be read, and what is wrong with the others."""
        return self.register.census()

    def show(self, workspace_id: str) -> Manifest:
        """Return the manifest of one workspace; one that is still a plain folder has none."""
        return self.register.show(workspace_id)

    def in_use(self) -> set[tuple[str, str]]:
        """Return the snapshots that workspaces need, as template and version.

        Raises `WorkspaceDamaged` when that cannot be known.
        """
        found = self.census()
        for error in found.damaged.values():
            raise error
        return {needed for manifest in found.manifests.values() for needed in manifest.snapshots()}

    async def grounds(self) -> Grounds:
        """Return what the workspaces stand on."""
        if self._layering is None:
            found: Layering = await in_thread(_layering)
            self._layering = found
        return Grounds(self.home, self.trees, self._snapshots, self._limits, self._layering, self._on_phase)

    @asynccontextmanager
    async def hold(
        self,
        workspace_id: str,
        *,
        network: Network | None = None,
        env: Mapping[str, str] | None = None,
        mounts: Sequence[Mount] = (),
    ) -> AsyncIterator[Workspace]:
        """Hold a workspace: until the end no other process does, though others may join its sandbox.

        One that another process holds is `WorkspaceBusy`, which names the process. At the end others that have joined
        are waited for, unless it is a cancellation that ends it.
        """
        workspace = await self._open(workspace_id, Outfit(network, env or {}, tuple(mounts), self._choose, self._reach))
        try:
            with workspace.pinned_snapshot():
                for settle in self._settle:
                    await settle(workspace)
                async with await self._door(workspace):
                    try:
                        yield workspace
                    except (asyncio.CancelledError, KeyboardInterrupt):
                        raise
                    except BaseException:
                        await workspace.alone()
                        raise
                    await workspace.alone()
        finally:
            await whole(workspace.close())

    @asynccontextmanager
    async def enter(
        self,
        workspace_id: str,
        *,
        network: Network | None = None,
        env: Mapping[str, str] | None = None,
        mounts: Sequence[Mount] = (),
    ) -> AsyncIterator[Sandbox]:
        """Use the sandbox of a workspace: hold it, or join whoever does, on that one's terms."""
        async with AsyncExitStack() as stack:
            deadline = time.monotonic() + _PATIENCE_S
            while True:
                try:
                    hold = self.hold(workspace_id, network=network, env=env, mounts=mounts)
                    sandbox = await (await stack.enter_async_context(hold)).sandbox()
                except Taken as busy:
                    joined = await self._joined(workspace_id)
                    if joined is None:
                        await _pause(deadline, busy)
                        continue
                    sandbox = await stack.enter_async_context(joined)
                break
            yield sandbox

    @asynccontextmanager
    async def join(self, workspace_id: str) -> AsyncIterator[Sandbox]:
        """Use the sandbox of whoever holds a workspace; `NotFound` if nobody does."""
        joined = await self._joined(workspace_id)
        if joined is None:
            raise NotFound(f"nobody runs the workspace {workspace_id}", hint="hold it")
        async with joined:
            yield joined

    async def _joined(self, workspace_id: str) -> Sandbox | None:
        """Join the sandbox of whoever holds a workspace; None if nobody does by now."""
        from skep.sandbox.neighbour import visit

        try:
            answer = await call(self.register.path(workspace_id), {"act": "join"})
            return await visit(socket.socket(fileno=answer.fds[0]), answer.body)
        except (NobodyHome, Unavailable, SandboxLost):
            return None

    async def act(self, workspace_id: str, name: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Do something with a workspace: here if nobody holds it, else in the process that does."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                async with self.hold(workspace_id) as workspace:
                    return await self._act(workspace, name, arguments or {})
            except Taken as busy:
                try:
                    request = {"act": name, "arguments": dict(arguments or {})}
                    return (await call(self.register.path(workspace_id), request)).body
                except NobodyHome:
                    await _pause(deadline, busy)

    async def _door(self, workspace: Workspace) -> Door:
        with explained(str(workspace.folder)):
            return await Door.open(workspace.folder, lambda request: self._answer(workspace, request))

    async def _answer(self, workspace: Workspace, request: dict[str, Any]) -> Answer:
        name = str(request.get("act"))
        if name == "join":
            return await workspace.admit()
        arguments = request.get("arguments")
        return Answer(await self._act(workspace, name, arguments if isinstance(arguments, dict) else {}))

    async def _act(self, workspace: Workspace, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if name not in self._acts:
            raise InvalidRequest(f"a workspace cannot {name[:40]!a}", hint="upgrade the Skep that holds the workspace")
        return await self._acts[name](workspace, arguments)

    async def checkpoint(self, workspace_id: str, name: str | None = None, *, note: str = "") -> Checkpoint:
        """Keep the present state of a workspace, whoever holds it."""
        done = await self.act(workspace_id, "checkpoint", {"name": name, "note": note})
        return Checkpoint.model_validate(done)

    async def rollback(self, workspace_id: str, to: str) -> Checkpoint:
        """Return to a checkpoint, whoever holds the workspace; see `Workspace.rollback`."""
        return Checkpoint.model_validate(await self.act(workspace_id, "rollback", {"to": to}))

    async def forget(self, workspace_id: str, name: str) -> None:
        """Let go of a checkpoint, and free what only it needed."""
        await self.act(workspace_id, "forget", {"name": name})
        await in_thread(self.sweep)

    async def diff(self, workspace_id: str, older: str = START, newer: str | None = None) -> Diff:
        """Tell what has changed from one checkpoint to another, or to now."""
        return Diff.model_validate(await self.act(workspace_id, "diff", {"older": older, "newer": newer}))

    async def suspend(self, workspace_id: str) -> Manifest:
        """End what runs in a workspace and let no sandbox start until `resume`."""
        return Manifest.model_validate(await self.act(workspace_id, "suspend"))

    async def resume(self, workspace_id: str) -> Manifest:
        return Manifest.model_validate(await self.act(workspace_id, "resume"))

    async def fetch(self, workspace_id: str, *, abandon: bool = False) -> Manifest:
        """Bring files home that a machine elsewhere has; see `Workspace.fetch`."""
        return Manifest.model_validate(await self.act(workspace_id, "fetch", {"abandon": abandon}))

    async def fork(self, source_id: str, new_ids: Sequence[str]) -> Manifests:
        """Make workspaces that begin with what another holds now, and share it; checkpoints are not taken along."""
        done = await self.act(source_id, "fork", {"ids": list(new_ids), "checkpoints": False})
        return [Manifest.model_validate(body) for body in done["made"]]

    async def clone(self, source_id: str, new_id: str) -> Manifest:
        """Fork a workspace with its checkpoints."""
        done = await self.act(source_id, "fork", {"ids": [new_id], "checkpoints": True})
        return Manifest.model_validate(done["made"][0])

    async def _fork(self, workspace: Workspace, asked: Mapping[str, Any]) -> dict[str, Any]:
        ids = [str(new_id) for new_id in asked["ids"]]
        made = await whole(fork(self.register, workspace, ids, checkpoints=bool(asked.get("checkpoints"))))
        return {"made": [manifest.model_dump(mode="json") for manifest in made]}

    async def destroy(
        self, workspace_id: str, *, archive: Callable[[Workspace], Awaitable[object]] | None = None
    ) -> None:
        """Do away with a workspace, after `archive` has put it away; if that fails, nothing is done.

        What forks of it need stays.
        """
        workspace = await self._open(workspace_id, Outfit(reach=self._reach))
        try:
            if archive is not None:
                await archive(workspace)
            await workspace.stop()
            await workspace.abandon()
            await in_thread(workspace.remove, self.register)
            self._on_phase("removed")
        finally:
            await whole(workspace.close())
        await in_thread(self.sweep)

    def discard(self, workspace_id: str) -> None:
        """Do away with what is left of a workspace that may lack parts of itself; harmless if nothing is."""
        if workspace_id in self.lost():
            self.recover(workspace_id)
        with explained(str(self.register.path(workspace_id))):
            try:
                holding = Holding.take(self.register.path(workspace_id))
            except FileNotFoundError:
                return
            try:
                self.register.remove(holding)
            finally:
                holding.close()
        self.sweep()

    def sweep(self) -> Ids:
        """Remove what nobody needs: workspaces that were never finished, and trees; return their ids."""
        with explained(str(self.home)):
            swept = self.register.sweep_half_made()
            self._on_phase("swept half-made")
            with alone(self.register.folder / LOCK):
                swept += self.register.collect()
            self._on_phase("collected")
            self.trees.clear()
        return swept

    def lost(self) -> dict[str, Manifest]:
        """Return workspaces whose folder or manifest is gone though their files are there; see `recover`."""
        return self.register.lost()

    def recover(self, workspace_id: str) -> Manifest:
        """Write the folder of a workspace again from the copy of its manifest that is kept beside its files."""
        found = self.lost().get(workspace_id)
        if found is None:
            raise NotFound(f"nothing is left of workspace {workspace_id}", hint="restore it from an archive")
        with explained(str(self.register.path(workspace_id))):
            holding = Holding.take(self.register.path(workspace_id), make=True)
        try:
            manifests.write(holding.folder, found)
            manifests.put(holding.folder / manifests.MARK, f"{found.birth}\n".encode())
        finally:
            holding.close()
        return found

    async def _open(self, workspace_id: str, outfit: Outfit) -> Workspace:
        grounds = await self.grounds()
        if self.register.condition(workspace_id) == "plain":
            # Without a snapshot: nobody has said which.
            await in_thread(self._adopt, grounds, making.born(workspace_id, "minimal", State()))
        self.register.need(workspace_id)
        with explained(str(self.register.path(workspace_id))):
            try:
                holding = Holding.take(self.register.path(workspace_id))
            except FileNotFoundError:
                raise NotFound(f"there is no workspace {workspace_id}", hint="skep workspace list") from None
        try:
            manifest = self.register.show(workspace_id)
            if manifest.id != workspace_id:
                raise WorkspaceDamaged(
                    f"the folder of workspace {workspace_id} holds the manifest of {manifest.id}",
                    hint=f"give the folder its name back, or skep workspace repair {workspace_id}",
                )
            await in_thread(self.trees.check, manifest.trees())
            for folder in (holding.folder, self.trees.beside(manifest.upper, ".")):
                manifests.clear_drafts(folder)
            return await Workspace(grounds, holding, manifest, outfit).ready()
        except BaseException:
            holding.close()
            raise


def _layering() -> Layering:
    from skep.sandbox.layering import layering

    return "overlay" if layering() == "overlay" else "copy"


async def _pause(deadline: float, busy: WorkspaceBusy) -> None:
    if time.monotonic() > deadline:
        raise busy
    await asyncio.sleep(_PAUSE_S)
