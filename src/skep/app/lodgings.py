"""The computers of sessions: workspaces of the apiary, with what each hive finds in them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from skep.app.apiary import Apiary, Tell, quiet, settled
from skep.app.household import Household
from skep.errors import Conflict, Denied, NotFound, Unavailable, WorkspaceBusy, WorkspaceDamaged
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount
from skep.sessions.computers import Condition, Mended
from skep.sessions.key import hive_key
from skep.sessions.session import Session
from skep.state.hives import Hive
from skep.workspace.door import NobodyHome, call
from skep.workspace.manifest import Manifest, Shown
from skep.workspace.packages.packages import Installed
from skep.workspace.workspace import Workspace

FindHive = Callable[[Session], Awaitable[Hive]]
Leave = Callable[[str], Awaitable[object]]
Made = Callable[[Session, Manifest], Awaitable[None]]

#: How long somebody who wants a sandbox of their own waits for one that is about to end.
_PATIENCE_S = 2.0


async def _tell_nobody(_: Session, __: Manifest) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Extras:
    """What the caller wants beyond what the settings and the template give: hosts to reach, folders to show."""

    allow: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.allow or self.mounts)


class Lodgings:
    """Makes, opens and puts away the workspaces of sessions; see `skep.sessions.computers.Computers`."""

    def __init__(
        self,
        apiary: Apiary,
        find_hive: FindHive,
        *,
        tell: Tell = quiet,
        on_made: Made = _tell_nobody,
        extras: Extras | None = None,
    ) -> None:
        #: Where the workspaces are.
        self.apiary = apiary
        self._find_hive = find_hive
        self._tell = tell
        self._on_made = on_made
        self._extras = extras or Extras()
        #: By hive. Nothing changes of what they are made of.
        self._households: dict[str, Household] = {}
        #: The workspaces in this process's hands, by their ids.
        self._held: dict[str, Workspace] = {}
        #: When a sandbox that has not got the extras was first found in the way.
        self._blocked_at: float | None = None
        #: What was begun because somebody asked for a workspace, by its id.
        self._leaving: dict[str, asyncio.Future[object]] = {}

    def let_leave(self, leave: Leave) -> None:
        """Say what is done when another process of this host asks for a workspace that this one has."""

        async def act(workspace: Workspace, _: Mapping[str, Any]) -> dict[str, Any]:
            # Answered first: what asks is waited for when the workspace is let go.
            if workspace.id not in self._leaving:
                task = self._leaving[workspace.id] = asyncio.ensure_future(leave(workspace.id))
                task.add_done_callback(lambda _: self._leaving.pop(workspace.id))
            return {}

        self.apiary.acts["leave"] = act

    async def condition(self, session: Session) -> Condition:
        workspaces = self.apiary.workspaces
        await take_over(self.apiary, session)
        match workspaces.register.condition(session.id):
            case "missing":
                return "damaged" if session.id in await asyncio.to_thread(workspaces.lost) else "missing"
            case "half-made" | "plain":
                return "half-made"
            case _:
                return "ready" if await asyncio.to_thread(self._is_whole, session) else "damaged"

    def _is_whole(self, session: Session) -> bool:
        workspaces = self.apiary.workspaces
        try:
            manifest = workspaces.show(session.id)
            _check_labels(session, manifest)
            workspaces.trees.check(manifest.trees())
        except WorkspaceDamaged:
            return False
        return manifest.id == session.id

    async def make(self, session: Session) -> None:
        shown = await self._shown(session)
        made = await self.apiary.settle(session.id, shown, labels=labels(session), tell=self._tell)
        if made is not None:
            await self._on_made(session, made)

    async def _shown(self, session: Session) -> tuple[Mount, ...]:
        household = self._households.get(session.hive_id)
        if household is None:
            hive = await self._find_hive(session)
            household = Household(self.apiary.home, hive.id, hive.account_id, hive.name)
            self._households[hive.id] = household
        await asyncio.to_thread(household.settle)
        return household.mounts()

    @asynccontextmanager
    async def hold(self, session: Session) -> AsyncIterator[Workspace]:
        extras, shown = self._extras, _shown(await self._shown(session))
        network = self.apiary.network_for(session.id, extras.allow)
        held = self.apiary.at(session.id).hold(session.id, network=network, mounts=extras.mounts)
        async with held as workspace:
            _check_labels(session, workspace.manifest)
            if workspace.manifest.shown != shown:  # the home has moved, or it came from elsewhere
                await workspace.amend(shown=shown)
            self._held[session.id] = workspace
            try:
                yield workspace
            finally:
                del self._held[session.id]

    @asynccontextmanager
    async def join(self, session: Session) -> AsyncIterator[Sandbox]:
        _check_labels(session, self.apiary.workspaces.show(session.id))
        self._refuse_extras(session)
        async with self.apiary.at(session.id).join(session.id) as sandbox:
            yield sandbox

    def _refuse_extras(self, session: Session) -> None:
        """Refuse to join a sandbox that has not got what was asked for, unless it may be about to end."""
        if not self._extras:
            return
        self._blocked_at = self._blocked_at or time.monotonic()
        if time.monotonic() - self._blocked_at > _PATIENCE_S:
            raise settled(session.id)
        raise Unavailable("the sandbox of another command is in the way", hint="wait for its end")

    async def hand_over(self, session: Session) -> None:
        with suppress(NobodyHome):
            await call(self.apiary.workspaces.register.path(session.id), {"act": "leave"})

    async def install(self, session: Session, *, python: Sequence[str], node: Sequence[str]) -> Installed:
        if (held := self._held.get(session.id)) is not None:  # then it ends when whoever asked for it is cancelled
            return await self.apiary.install_into(held, python=python, node=node, tell=self._tell)
        return await self.apiary.install(session.id, python=python, node=node, tell=self._tell)

    async def mend(self, session: Session) -> Mended:
        """Repair from the manifest and the snapshot, else return to a checkpoint, else to an archive."""
        if self.apiary.workspaces.register.condition(session.id) == "plain":
            await self.make(session)
            return Mended(("took in a plain folder as the workspace",))
        done, lost = await self._repair(session)
        mended = Mended(done, lost)
        if not await asyncio.to_thread(self._is_whole, session):
            mended = await self._bring_back(session, done, lost)
        for deed in mended.done:
            self._tell(f"the workspace was damaged: {deed}")
        for loss in mended.lost:
            self._tell(f"lost: {loss}")
        return mended

    async def _repair(self, session: Session) -> tuple[tuple[str, ...], tuple[str, ...]]:
        lost: tuple[str, ...] = ()
        repaired = await self.apiary.repair(session.id, tell=self._tell)
        if not await asyncio.to_thread(self._is_whole, session):
            with suppress(WorkspaceDamaged, NotFound):
                back = await self.apiary.step_back(session.id)
                lost = back.lost() if back is not None else ()
                again = await self.apiary.repair(session.id, tell=self._tell)
                repaired = replace(again, done=(*repaired.done, *again.done))
        return repaired.done, (*lost, *(finding.message for finding in repaired.left))

    async def _bring_back(self, session: Session, done: tuple[str, ...], lost: tuple[str, ...]) -> Mended:
        """Make the workspace from its newest archive, if there is one; what is left of it is kept beside it."""
        version = session.archive or await self._newest_archive(session)
        if version is None:
            return Mended(done, lost)
        aside = f"{session.id}-{secrets.token_hex(4)}"
        with suppress(NotFound):
            await self.apiary.rehouse(session.id, aside, labels={})
            done = (*done, f"kept what is left of it as the workspace {aside}")
        await self.unarchive(session, version)
        return Mended((*done, f"restored it from the archive {version}"), (f"everything since {version} was saved",))

    async def _newest_archive(self, session: Session) -> str | None:
        found = await self.apiary.archive().list(session.id)
        return max(found, key=lambda one: one.saved_at).version if found else None

    async def save(self, session: Session) -> str:
        _check_labels(session, self.apiary.workspaces.show(session.id))
        return (await self.apiary.put_away(session.id)).version

    async def free(self, session: Session) -> None:
        with suppress(NotFound):
            _check_labels(session, self.apiary.workspaces.show(session.id))
            await self.apiary.destroy(session.id, archived=False)

    async def unarchive(self, session: Session, archive: str) -> None:
        shown = await self._shown(session)
        await self.apiary.bring_back(session.id, version=archive, shown=shown, labels=labels(session))

    async def destroy(self, session: Session) -> None:
        with suppress(WorkspaceDamaged):  # what is left goes too
            await self.free(session)
        await asyncio.to_thread(self.apiary.workspaces.discard, session.id)
        with suppress(NotFound):
            await self.apiary.archive().delete(session.id)


async def take_over(apiary: Apiary, session: Session) -> None:
    """Give a workspace from before there were sessions, which has the id of its hive, the id of the hive's session."""
    if session.key != hive_key(session.hive_id):
        return
    register = apiary.workspaces.register
    if register.condition(session.id) == "missing" and register.condition(session.hive_id) not in (
        "missing",
        "half-made",
    ):
        try:
            await apiary.rehouse(session.hive_id, session.id, labels=labels(session))
        except WorkspaceBusy:
            raise
        except (Conflict, NotFound):
            pass  # another process was faster


def _shown(mounts: tuple[Mount, ...]) -> tuple[Shown, ...]:
    return tuple(Shown(host=mount.host, inside=mount.inside, mode=mount.mode) for mount in mounts)


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
