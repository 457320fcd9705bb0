"""Stop, pack away, bring back and delete the computers of sessions."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from skep.errors import Conflict, LeaseLost, NotFound, SkepError
from skep.sessions.live import Live
from skep.sessions.session import RUNNING, Session, Status

if TYPE_CHECKING:
    from skep.sessions.sessions import Sessions

#: Says whether what was decided about a session still holds for it: then it is taken from nobody, and not while it is
#: in use.
Still = Callable[[Session], bool]


class Changed(Conflict):
    """A session is not any more as it was when something was decided about it."""


class Act(Protocol):
    """One of the ways to put a session away."""

    def __call__(
        self, sessions: Sessions, session_id: str, *, reason: str, still: Still | None
    ) -> Awaitable[Session]: ...


async def pause(sessions: Sessions, session_id: str) -> Session:
    """Halt everything in a computer of this process until it is resolved again."""
    async with sessions.acting(session_id):
        live = sessions.live(session_id)
        if live is None or live.joined:
            raise NotFound(f"session {session_id} does not run in this process", hint="resolve it here first")
        await live.sandbox.pause()
        live.session = await sessions.ledger.change(live.session, "paused", reason="somebody asked for it")
        return live.session


async def stop(
    sessions: Sessions,
    session_id: str,
    *,
    reason: str = "somebody asked for it",
    patient: bool = False,
    still: Still | None = None,
) -> Session:
    """End the sandbox of a session, wherever on this host it runs; its workspace stays.

    With `patient`, other processes that have joined the sandbox of this one are waited for.
    """
    async with sessions.acting(session_id):
        session = await _stopped(sessions, session_id, reason, patient=patient, still=still)
        return await sessions.ledger.release(session)


async def leave(sessions: Sessions, session_id: str, *, still: Still) -> None:
    """Leave the computer of another process that this one has joined, unless it is used by now."""
    async with sessions.acting(session_id):
        live = sessions.live(session_id)
        if live is None or not live.joined or not await _retired(live, still):
            raise _changed(session_id)
        sessions.forget(session_id)
        await live.end()


async def drop(sessions: Sessions, live: Live) -> bool:
    """End a computer whose session is another process's by now, without a word about it; say whether it was there."""
    session_id = live.session.id
    async with sessions.acting(session_id):
        if sessions.live(session_id) is not live:
            return False
        sessions.forget(session_id)
        await live.end()
    return True


async def archive(
    sessions: Sessions, session_id: str, *, reason: str = "somebody asked for it", still: Still | None = None
) -> Session:
    """Save the workspace of a session and free its folder. At every moment it is in one of the two, and known to be."""
    ledger, computers = sessions.ledger, sessions.computers
    async with sessions.acting(session_id):
        session = await _stopped(sessions, session_id, reason, still=still)
        if session.status == "archived":
            await computers.free(session)  # whoever archived it may not have come to the end
            return await ledger.release(session)
        if session.status == "destroyed" or await computers.condition(session) == "missing":
            await ledger.release(session)
            raise Conflict(f"session {session_id} has no workspace to archive", hint="skep session show tells more")
        try:
            session = await ledger.change(session, "archived", reason=reason, archive=await computers.save(session))
            await computers.free(session)
        except LeaseLost:
            raise
        except SkepError as error:
            session = await ledger.note(session, last_error=error.message)
            raise
        finally:
            session = await ledger.release(session)
        return session


async def restore(sessions: Sessions, session_id: str) -> Session:
    """Bring the workspace of an archived session back, without starting its sandbox."""
    ledger, computers = sessions.ledger, sessions.computers
    async with sessions.acting(session_id):
        _require_archived(await ledger.get(session_id))  # before it is taken from whoever runs it
        session = await _claimed(sessions, session_id)
        try:
            _require_archived(session)
        except Conflict:
            await ledger.release(session)
            raise
        session = await ledger.change(session, "resuming", reason="somebody asked for its workspace back")
        try:
            if await computers.condition(session) != "ready":
                await computers.unarchive(session, session.archive or "")
        except SkepError as error:
            await sessions.recovery.give_up(session, error)
            raise
        now = ledger.now()
        session = await ledger.change(
            session, "stopped", reason="its workspace is back", unarchived_at=now, warned_at=None, host=ledger.host
        )
        return await ledger.release(session)


def _require_archived(session: Session) -> None:
    if session.status != "archived" or session.archive is None:
        raise Conflict(f"session {session.id} is {session.status}, not archived", hint="skep session list")


async def delete(
    sessions: Sessions, session_id: str, *, reason: str = "somebody asked for it", still: Still | None = None
) -> Session:
    """Remove the workspace and the archive of a session for good. Its key can be used again, and starts empty.

    It counts as deleted before anything is removed: a crash in between leaves rubbish, and never half a workspace.
    """
    async with sessions.acting(session_id):
        session = await _stopped(sessions, session_id, reason, still=still)
        if session.status != "destroyed":
            session = await sessions.ledger.change(session, "destroyed", reason=reason)
        await sessions.computers.destroy(session)
        return await sessions.ledger.note(session, controller=None, archive=None, rooms={}, generation=0)


async def stop_all(sessions: Sessions, *, patient: bool = True) -> None:
    """End every computer of this process, `patient` when nobody else uses it; they can be resolved elsewhere."""
    for live in sessions.running():
        with contextlib.suppress(LeaseLost):
            if live.joined:
                sessions.forget(live.session.id)
                await live.end()
            else:
                await stop(sessions, live.session.id, reason="its controller ends", patient=patient)


async def _stopped(
    sessions: Sessions, session_id: str, reason: str, *, patient: bool = False, still: Still | None = None
) -> Session:
    """Claim a session with nothing running."""
    live = sessions.live(session_id)
    if live is not None and still is not None and (live.joined or not await _retired(live, still)):
        raise _changed(session_id)
    sessions.forget(session_id)
    if live is not None:
        await live.end(patient=patient)
    if live is not None and not live.joined:
        session = live.session
    else:
        session = await (_claimed(sessions, session_id) if still is None else claim_if(sessions, session_id, still))
    if session.status in RUNNING:
        used_at = max(session.active_at, live.used_at) if live is not None else session.active_at
        to: Status = "archived" if await _is_still_packed(sessions, session) else "stopped"
        session = await sessions.ledger.change(session, to, reason=reason, active_at=used_at)
    return session


async def _retired(live: Live, still: Still) -> bool:
    return still(replace(live.session, active_at=live.used_at)) and await live.retire()


async def _is_still_packed(sessions: Sessions, session: Session) -> bool:
    """Say whether somebody began to bring a workspace back from the archive, and did not come to the end."""
    if session.status != "resuming" or session.archive is None:
        return False
    return await sessions.computers.condition(session) in ("missing", "half-made")


async def claim_if(sessions: Sessions, session_id: str, still: Still) -> Session:
    """Claim a session that nobody has, and that is still as it was when something was decided about it."""
    session = await sessions.ledger.get(session_id)
    claimed = None if sessions.live(session_id) else await sessions.ledger.claim(session, reason="")
    if claimed is None:
        raise _changed(session_id)
    if not still(claimed):
        await sessions.ledger.release(claimed)
        raise _changed(session_id)
    return claimed


def _changed(session_id: str) -> Changed:
    return Changed(f"session {session_id} is in use, or not any more what it was", hint="look at it again")


async def _claimed(sessions: Sessions, session_id: str) -> Session:
    """Claim a session that is on record; a process of this host that has it is asked to let it go."""
    session = await sessions.ledger.get(session_id)
    claimed = await sessions.recovery.claim(session, join=False)
    assert not isinstance(claimed, Live)
    return claimed
