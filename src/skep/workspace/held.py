"""A workspace in this process's hands: its manifest, and the sandbox over it.

The manifest is written before the sandbox is moved to what it says. A crash in between costs nothing: the sandbox ends
with its controller, and whatever was written inside until then is in the tree that the new manifest has sealed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from skep.errors import Conflict, SandboxLost, StorageFull, WorkspaceBusy, WorkspaceDamaged
from skep.sandbox.egress.network import Network
from skep.sandbox.mechanisms import MECHANISMS, Choice, Feature, Needs
from skep.sandbox.recipe import Recipe
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount
from skep.workspace import manifest as manifests
from skep.workspace.copies import copy_in
from skep.workspace.faults import explained, in_thread
from skep.workspace.grounds import Grounds
from skep.workspace.holding import Holding
from skep.workspace.manifest import Manifest, Out
from skep.workspace.register import Register
from skep.workspace.snapshot.snapshot import Snapshot

if TYPE_CHECKING:  # it brings archives along, which only sandboxes elsewhere have a use for
    from skep.workspace.outing import Outing

#: More layers than this are merged: each costs time in every look-up, and the kernel takes no more than 500.
MOST_LAYERS = 24
#: Says what holds the sandbox over a workspace. It is asked whenever one starts, whoever wants it.
Choose = Callable[[Manifest, Needs], Awaitable[Choice]]


#: Says how a mechanism is told to be reached, by its name, on whose machine files of a workspace still are.
Reach = Callable[[str], Mapping[str, Any]]


def by_itself(_: str) -> Mapping[str, Any]:
    """Leave it to the mechanism to find out."""
    return {}


async def by_bubblewrap(_: Manifest, __: Needs) -> Choice:
    """Choose what needs nothing else."""
    return Choice()


@dataclass(frozen=True, slots=True)
class Outfit:
    """What the caller wants of the sandbox over a workspace."""

    network: Network | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    choose: Choose = by_bubblewrap
    reach: Reach = by_itself


class Held:
    """One workspace, held until `close`."""

    def __init__(self, grounds: Grounds, holding: Holding, manifest: Manifest, outfit: Outfit) -> None:
        self.grounds = grounds
        self.manifest = manifest
        self._holding = holding
        self._outfit = outfit
        self._sandbox: Sandbox | None = None
        self._outing: Outing | None = None
        self._choice = Choice()
        self._turn = asyncio.Lock()

    @property
    def id(self) -> str:
        return self.manifest.id

    @property
    def folder(self) -> Path:
        """Where the manifest is on the host."""
        return self._holding.folder

    async def sandbox(self) -> Sandbox:
        """Return the sandbox over the workspace, started if none runs."""
        async with self._turn:
            return await self.live() or await self._start()

    async def live(self) -> Sandbox | None:
        """Return the sandbox if one runs."""
        if self._sandbox is not None and not await self._sandbox.alive():
            await self.stop()
        return self._sandbox

    async def stop(self) -> None:
        """End the sandbox, if one runs, and all that is in it.

        One elsewhere whose files cannot be brought home now keeps them: whoever starts the next one goes on there.
        """
        if self._sandbox is None:
            return
        ending, self._sandbox = self._sandbox, None
        outing, self._outing = self._outing, None
        if outing is None:
            await ending.stop()
            return
        from skep.workspace.outing import come_back

        await come_back(outing)

    async def come_home(self, *, for_good: bool = False) -> None:
        """Have the files here as they are now, if a machine elsewhere has them; it is given up if it is `for_good`.

        Whoever reads files of a workspace without its sandbox calls this first. What cannot be had now is refused.
        """
        out = self.manifest.out
        if out is None or out.stage != "out":
            return
        from skep.workspace.outing import go_back

        if await self.live() is not None and self._outing is not None and not for_good:
            await self._outing.come_home()
            return
        outing, self._outing, self._sandbox = self._outing, None, None
        outing = outing or await go_back(self, await self._recipe(Choice(out.mechanism, self._reach(out))), out)
        try:
            await outing.end()
        except BaseException:
            await outing.leave()
            raise

    async def abandon(self) -> None:
        """Go on with the files that are here, and give up a machine elsewhere that may have newer ones."""
        if (out := self.manifest.out) is None:
            return
        from skep.workspace.outing import clear

        outing, self._outing = self._outing, None
        if outing is not None:
            self._sandbox = None
            await outing.leave()
        await clear(self, self._reach(out))
        if self.manifest.out is not None:
            await self.save(self.manifest.changed(out=None))

    async def close(self) -> None:
        """End the sandbox and let go of the workspace."""
        try:
            await self.stop()
        finally:
            self._holding.close()

    def remove(self, register: Register) -> None:
        """Make the workspace one that is no more; what it was made of is left to a sweep."""
        register.remove(self._holding)

    async def ready(self) -> Self:
        """Put a workspace that was made in layers together into one folder where there can be no layers."""
        manifest, grounds = self.manifest, self.grounds
        if grounds.layering == "copy" and (manifest.layers or manifest.below.based):
            async with grounds.referring():
                stack = grounds.stack(manifest)
                upper = await in_thread(grounds.copy, manifest, [stack.upper, *stack.layers])
                await self.save(manifest.changed(upper=upper, layers=(), based=False))
        return self

    @contextmanager
    def pinned_snapshot(self) -> Iterator[None]:
        """Keep the snapshot below the workspace from being collected."""
        version = self.manifest.snapshot_version
        if version is None or not self.manifest.below.based:
            yield
            return
        with pinned(self.grounds.snapshot(self.manifest.template, version)):
            yield

    async def amend(self, **changes: Any) -> Manifest:
        """Write the manifest with some fields changed, and return it."""
        async with self._turn:
            await self.save(self.manifest.changed(**changes))
        return self.manifest

    async def save(self, manifest: Manifest) -> None:
        """Replace the manifest; when this returns it is on the disk."""
        await in_thread(self._save, manifest)
        self.manifest = manifest

    def _save(self, manifest: Manifest) -> None:
        if not self._holding.valid():
            raise WorkspaceDamaged(
                f"the folder {self.folder} was removed or replaced while the workspace was in use",
                hint=f"its files are safe: skep workspace repair {self.id}",
            )
        there = self.grounds.trees.all()
        dropped = tuple(tree_id for tree_id in manifest.dropped if tree_id in there)
        manifests.write(self.folder, manifest.model_copy(update={"dropped": dropped}))
        keep_copy(self.grounds, manifest)
        vouch(self.grounds, manifest)

    async def swap(self) -> None:
        """Move a running sandbox to what the manifest says; `WorkspaceBusy` if something runs in it."""
        if sandbox := await self.live():
            with suppress(SandboxLost):  # the next one starts over what the manifest says
                await sandbox.restack(self.grounds.stack(self.manifest))

    async def swap_now(self) -> None:
        """Move a running sandbox to what the manifest says; what runs in it is ended, and it too if need be."""
        if "layers" not in self._choice.offers:
            await self.stop()
            return
        sandbox = await self.live()
        try:
            for _ in range(_ROUNDS):
                if sandbox is None:
                    return
                with suppress(WorkspaceBusy):
                    await self.swap()
                    return
                await sandbox.kill_all()
                await asyncio.sleep(_ROUND_S)
            await self.stop()
        except BaseException:
            await self.stop()
            raise

    @asynccontextmanager
    async def halted(self) -> AsyncIterator[None]:
        """Let nothing in the sandbox move for a while."""
        sandbox = await self.live()
        if sandbox is None or self._outing is not None:  # then nothing here moves anyway
            yield
            return
        with suppress(SandboxLost):
            await sandbox.pause()
        try:
            yield
        finally:
            with suppress(SandboxLost):
                await sandbox.resume()

    async def _start(self) -> Sandbox:
        if self.manifest.suspended:
            raise Conflict(f"workspace {self.id} is suspended", hint=f"skep workspace resume {self.id}")
        mounts = [*(shown.mount() for shown in self.manifest.shown), *self._outfit.mounts]
        choice = await self._outfit.choose(self.manifest, self._needs(mounts))
        await self._settle_outing(choice)
        if "layers" in choice.offers:
            await self.compact()
        else:
            await self._flatten()
        await in_thread(self.grounds.trees.check, self.manifest.trees())
        self._choice, self._sandbox = choice, await self._create(choice, mounts)
        return self._sandbox

    def _needs(self, mounts: Sequence[Mount]) -> Needs:
        needs: set[Feature] = {"folder"}
        if self._outfit.network is not None:
            needs.add("network")
        if any(mount.mode != "read-only" for mount in mounts):
            needs.add("mounts")
        return frozenset(needs)

    async def _flatten(self) -> None:
        """Be one folder from here on, in which a mechanism without layers can work."""
        self.grounds = replace(self.grounds, layering="copy")
        await self.ready()

    async def _settle_outing(self, choice: Choice) -> None:
        """Have files that are elsewhere brought home, unless this choice leads to where they are."""
        out = self.manifest.out
        if out is None or choice.mechanism == out.mechanism or choice.mechanism not in MECHANISMS:
            return
        await self.come_home(for_good=True)
        if self.manifest.out is not None:  # what is left of one that has not begun, or is over
            from skep.workspace.outing import clear

            await clear(self, self._reach(out))

    def _reach(self, out: Out) -> Mapping[str, Any]:
        return self._outfit.reach(out.mechanism)

    async def _recipe(self, choice: Choice) -> Recipe:
        """Say how a sandbox elsewhere is made: of this machine it shows nothing."""
        return Recipe(
            limits=await in_thread(self.grounds.limits_for, self.manifest),
            env={**self._environment(), **self._outfit.env},
            network=self._outfit.network,
            mechanism=choice.mechanism,
            options=choice.options,
            labels=self.manifest.labels,
        )

    async def _create(self, choice: Choice, mounts: Sequence[Mount]) -> Sandbox:
        if choice.elsewhere:
            from skep.workspace.outing import set_out

            self._outing = await set_out(self, await self._recipe(choice), mounts)
            return self._outing.sandbox
        stack = self.grounds.stack(self.manifest)
        layered, showing = "layers" in choice.offers, "mounts" in choice.offers
        sandbox = await Sandbox.create(
            None if layered else stack.upper,
            stack=stack if layered else None,
            limits=await in_thread(self.grounds.limits_for, self.manifest),
            mounts=mounts if showing else (),
            network=self._outfit.network,
            env={**self._environment(), **self._outfit.env},
            mechanism=choice.mechanism,
            options=choice.options,
            labels=self.manifest.labels,
        )
        try:
            if not showing:
                await copy_in(sandbox, mounts)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    def _environment(self) -> Mapping[str, str]:
        version = self.manifest.snapshot_version
        try:
            return self.grounds.snapshot(self.manifest.template, version).environment if version else {}
        except WorkspaceDamaged:
            return {}  # it was copied and is not needed any more

    async def compact(self) -> None:
        """Merge the layers if there are too many."""
        if len(self.manifest.layers) <= MOST_LAYERS:
            return
        async with self.grounds.referring():
            merged = await in_thread(self.grounds.merge, self.manifest, self.manifest.layers)
            self.grounds.on_phase("merged")
            await self.save(self.manifest.changed(layers=(merged,)))


@contextmanager
def pinned(snapshot: Snapshot) -> Iterator[None]:
    """Keep a snapshot from being collected."""
    with ExitStack() as pins:
        with explained(str(snapshot.folder)):
            pins.enter_context(snapshot.pinned())
        yield


_ROUNDS = 500
_ROUND_S = 0.01


def keep_copy(grounds: Grounds, manifest: Manifest) -> None:
    """Keep the manifest beside the files too, from where it can be written again if its own folder is lost."""
    with suppress(StorageFull):  # then the copy from before has to serve
        manifests.put(grounds.trees.beside(manifest.upper, manifests.NAME), manifests.dump(manifest), lasting=False)


def vouch(grounds: Grounds, manifest: Manifest) -> None:
    """Note beside the files that the workspace was finished: a mark that is lost later must not cost them."""
    with suppress(OSError):
        grounds.trees.beside(manifest.upper, manifests.MARK).touch(mode=0o600)
