"""The computers of sessions: workspaces of the apiary, with what each hive finds in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from skep.app.apiary import Apiary, Tell, quiet
from skep.app.household import Household
from skep.errors import Denied, NotFound, WorkspaceDamaged
from skep.sandbox.sandbox import Sandbox
from skep.sessions.computers import Condition, Mended
from skep.sessions.session import Session
from skep.state.hives import Hive
from skep.workspace.door import NobodyHome, call
from skep.workspace.manifest import Manifest
from skep.workspace.workspace import Workspace

FindHive = Callable[[Session], Awaitable[Hive]]
Leave = Callable[[str], Awaitable[object]]


class Lodgings:
    """Makes, opens and puts away the workspaces of sessions; see `skep.sessions.computers.Computers`."""

    def __init__(self, apiary: Apiary, find_hive: FindHive, *, tell: Tell = quiet) -> None:
        self._apiary = apiary
        self._find_hive = find_hive
        self._tell = tell
        self._leaving: set[asyncio.Task[object]] = set()

    def let_leave(self, leave: Leave) -> None:
        """Say what is done when another process of this host asks for a workspace that this one has."""

        async def act(workspace: Workspace, _: Mapping[str, Any]) -> dict[str, Any]:
            # Answered first: what asks is waited for when the workspace is let go.
            task = asyncio.ensure_future(leave(workspace.id))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            return {}

        self._apiary.acts["leave"] = act

    async def condition(self, session: Session) -> Condition:
        workspaces = self._apiary.workspaces
        match workspaces.register.condition(session.id):
            case "missing":
                return "damaged" if session.id in await asyncio.to_thread(workspaces.lost) else "missing"
            case "half-made":
                return "half-made"
            case _:
                return "ready" if await asyncio.to_thread(self._is_whole, session) else "damaged"

    def _is_whole(self, session: Session) -> bool:
        workspaces = self._apiary.workspaces
        try:
            manifest = workspaces.show(session.id)
            _check_labels(session, manifest)
            workspaces.trees.check(manifest.trees())
        except WorkspaceDamaged:
            return False
        return manifest.id == session.id

    async def make(self, session: Session) -> None:
        shown = await self._shown(session)
        await self._apiary.settle(session.id, shown, labels=labels(session), tell=self._tell)

    async def _shown(self, session: Session) -> Any:
        hive = await self._find_hive(session)
        household = Household(self._apiary.home, hive.id, hive.account_id, hive.name)
        await asyncio.to_thread(household.settle)
        return household.mounts()

    @asynccontextmanager
    async def hold(self, session: Session) -> AsyncIterator[Workspace]:
        async with self._apiary.at(session.id).hold(session.id) as workspace:
            _check_labels(session, workspace.manifest)
            yield workspace

    @asynccontextmanager
    async def join(self, session: Session) -> AsyncIterator[Sandbox]:
        _check_labels(session, self._apiary.workspaces.show(session.id))
        async with self._apiary.at(session.id).join(session.id) as sandbox:
            yield sandbox

    async def hand_over(self, session: Session) -> None:
        with suppress(NobodyHome):
            await call(self._apiary.workspaces.register.path(session.id), {"act": "leave"})

    async def mend(self, session: Session) -> Mended:
        lost: tuple[str, ...] = ()
        if (back := await self._apiary.step_back(session.id)) is not None:
            lost = (f"everything since the checkpoint {back}, for the files written after it are gone",)
        repaired = await self._apiary.repair(session.id, tell=self._tell)
        return Mended(repaired.done, (*lost, *(finding.message for finding in repaired.left)))

    async def save(self, session: Session) -> str:
        _check_labels(session, self._apiary.workspaces.show(session.id))
        return (await self._apiary.put_away(session.id)).version

    async def free(self, session: Session) -> None:
        with suppress(NotFound):
            _check_labels(session, self._apiary.workspaces.show(session.id))
            await self._apiary.destroy(session.id, archived=False)

    async def unarchive(self, session: Session, archive: str) -> None:
        shown = await self._shown(session)
        await self._apiary.bring_back(session.id, version=archive, shown=shown, labels=labels(session))

    async def destroy(self, session: Session) -> None:
        await self.free(session)
        with suppress(NotFound):
            await self._apiary.archive().delete(session.id)


def labels(session: Session) -> dict[str, str]:
    """Return what the workspace of a session says about whose it is."""
    return {"account": session.account_id, "hive": session.hive_id, "session": session.id}


def _check_labels(session: Session, manifest: Manifest) -> None:
    """Refuse a workspace that was made for somebody else, wherever it lies. One without labels was a person's work."""
    if manifest.labels and manifest.labels != labels(session):
        raise Denied(
            f"in the place of the workspace of {session.key} lies one that was made for another session",
            hint=f"give the folders below workspaces/ their names back; it says it is {manifest.id}",
        )
