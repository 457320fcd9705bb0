"""One workspace that this process holds, and what can be done with it."""

from __future__ import annotations

import asyncio

from skep.errors import NotFound, Unavailable
from skep.workspace import checkpoint
from skep.workspace.diff import Diff, compare
from skep.workspace.door import Answer
from skep.workspace.faults import in_thread, whole
from skep.workspace.held import Held
from skep.workspace.manifest import Checkpoint, Manifest, State

_PAUSE_S = 0.01
#: In place of a checkpoint: what the workspace was before anything was written.
START = "start"


class Workspace(Held):
    """A workspace, its sandbox and its checkpoints. Get one from `Workspaces.hold`."""

    _leaving = False
    _arriving = 0

    async def admit(self) -> Answer:
        """Let another process join the sandbox."""
        if self._leaving:
            raise Unavailable(f"workspace {self.id} is about to be let go of", hint="try again")
        self._arriving += 1
        try:
            sandbox = await self.sandbox()
            return Answer(sandbox.introduction(), ((await sandbox.admit()).detach(),))
        finally:
            self._arriving -= 1

    async def alone(self) -> None:
        """Wait until nobody else uses the sandbox, and admit nobody from then on."""
        while (sandbox := await self.live()) is not None and (self._arriving or sandbox.guests):
            waits = [asyncio.ensure_future(wait) for wait in (sandbox.alone(), sandbox.gone())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            await asyncio.sleep(_PAUSE_S if self._arriving else 0)
        self._leaving = True

    async def leave(self) -> None:
        """End the sandbox under whoever uses it, and admit nobody from then on."""
        self._leaving = True
        while self._arriving:  # noqa: ASYNC110 - whoever arrives tells nobody
            await asyncio.sleep(_PAUSE_S)
        async with self._turn:
            await self.stop()

    async def suspend(self) -> Manifest:
        """End what runs in it and let no sandbox start until `resume`."""
        return await whole(self._suspend(True))

    async def resume(self) -> Manifest:
        return await whole(self._suspend(False))

    async def _suspend(self, suspended: bool) -> Manifest:
        async with self._turn:
            if suspended:
                await self.stop()
            if self.manifest.suspended != suspended:
                await self.save(self.manifest.changed(suspended=suspended))
            return self.manifest

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return its checkpoints, the oldest first."""
        return self.manifest.checkpoints

    async def checkpoint(self, name: str | None = None, *, note: str = "") -> Checkpoint:
        """Keep the present state under a new id. Nothing that runs inside is ended."""

        async def take() -> Checkpoint:
            async with self._turn:
                return await checkpoint.take(self, name, note)

        return await whole(take())

    async def rollback(self, to: str) -> Checkpoint:
        """Return to a checkpoint, by id or name; what runs inside is ended.

        Returns the checkpoint that was made of the state that was left: going back to that one undoes it.
        """

        async def roll_back() -> Checkpoint:
            async with self._turn:
                return await checkpoint.roll_back(self, self.manifest.checkpoint(to))

        return await whole(roll_back())

    async def forget(self, name: str) -> None:
        """Let go of a checkpoint; what only it needed is removed by the next sweep."""

        async def forget() -> None:
            async with self._turn:
                await checkpoint.forget(self, self.manifest.checkpoint(name))

        await whole(forget())

    async def fetch(self, *, abandon: bool = False) -> Manifest:
        """Have the files here that a machine elsewhere has; or give those up, and go on with what is here."""

        async def fetch() -> Manifest:
            async with self._turn:
                await (self.abandon() if abandon else self.come_home())
                return self.manifest

        return await whole(fetch())

    async def freeze(self) -> State:
        """Keep the present state for whoever refers to it next, before trees are collected again."""

        async def freeze() -> State:
            async with self._turn:
                return await checkpoint.freeze(self)

        return await whole(freeze())

    async def diff(self, older: str = START, newer: str | None = None) -> Diff:
        """Tell what has changed from one checkpoint to another, or to now."""
        before = self._layers(older)
        if newer is not None:
            return await in_thread(compare, before, self._layers(newer))
        async with self._turn:
            await self.come_home()
        async with self._turn, self.halted():
            stack = self.grounds.stack(self.manifest)
            return await in_thread(compare, before, [stack.upper, *stack.layers])

    def _layers(self, name: str) -> list[str]:
        template = self.manifest.template
        try:
            state = self.manifest.checkpoint(name).state
        except NotFound:
            if name != START:
                raise
            state = self.manifest.below.model_copy(update={"layers": (), "based": True})
        return self.grounds.layers(state, template)
