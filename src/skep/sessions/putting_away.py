"""Stop, pack away, bring back and delete the computers of sessions."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from skep.errors import Conflict, LeaseLost, NotFound, SkepError
from skep.sessions.live import Live
from skep.sessions.session import RUNNING, Session

if TYPE_CHECKING:
    from skep.sessions.sessions import Sessions


async def pause(sessions: Sessions, session_id: str) -> Session:
    """Halt everything in a computer of this process until it is resolved again."""
    async with sessions.turn(session_id):
        live = sessions.live(session_id)
        if live is None or live.joined:
            raise NotFound(f"session {session_id} does not run in this process", hint="resolve it here first")
        await live.sandbox.pause()
        live.session = await sessions.ledger.change(live.session, "paused", reason="somebody asked for it")
        return live.session


async def stop(
    sessions: Sessions, session_id: str, *, reason: str = "somebody asked for it", patient: bool = False
) -> Session:
    """End the sandbox of a session, wherever on this host it runs; its workspace stays.

    With `patient`, other processes that have joined the sandbox of this one are waited for.
    """
    async with sessions.turn(session_id):
        return await sessions.ledger.release(await _stopped(sessions, session_id, reason, patient=patient))


async def archive(sessions: Sessions, session_id: str, *, reason: str = "somebody asked for it") -> Session:
    """Save the workspace of a session and free its folder. At every moment it is in one of the two, and known to be."""
    ledger, computers = sessions.ledger, sessions.computers
    async with sessions.turn(session_id):
        session = await _stopped(sessions, session_id, reason)
        if session.status == "archived":
            await computers.free(session)  # whoever archived it may not have come to the end
            return await ledger.release(session)
        if session.status == "destroyed" or await computers.condition(session) == "missing":
            await ledger.release(session)
            raise Conflict(f"session {session_id} has no workspace to archive", hint="skep session show tells more")
        try:
            session = await ledger.note(session, archive=await computers.save(session))
            session = await ledger.change(session, "archived", reason=reason)
            await computers.free(session)
        finally:
            session = await ledger.release(session)
        return session


async def restore(sessions: Sessions, session_id: str) -> Session:
    """Bring the workspace of an archived session back, without starting its sandbox."""
    ledger, computers = sessions.ledger, sessions.computers
    async with sessions.turn(session_id):
        session = await _claimed(sessions, session_id)
        if session.status != "archived" or session.archive is None:
            await ledger.release(session)
            raise Conflict(f"session {session_id} is {session.status}, not archived", hint="skep session list")
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


async def delete(sessions: Sessions, session_id: str, *, reason: str = "somebody asked for it") -> Session:
    """Remove the workspace and the archive of a session for good. Its key can be used again, and starts empty.

    It counts as deleted before anything is removed: a crash in between leaves rubbish, and never half a workspace.
    """
    async with sessions.turn(session_id):
        session = await _stopped(sessions, session_id, reason)
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


async def _stopped(sessions: Sessions, session_id: str, reason: str, *, patient: bool = False) -> Session:
    """Claim a session with nothing running."""
    live = sessions.forget(session_id)
    if live is not None:
        await live.end(patient=patient)
    session = live.session if live is not None and not live.joined else await _claimed(sessions, session_id)
    if session.status in RUNNING:
        used_at = max(session.active_at, live.used_at) if live is not None else session.active_at
        session = await sessions.ledger.change(session, "stopped", reason=reason, active_at=used_at)
    return session


async def _claimed(sessions: Sessions, session_id: str) -> Session:
    """Claim a session that is on record; a process of this host that has it is asked to let it go."""
    session = await sessions.ledger.get(session_id)
    claimed = await sessions.ledger.claim(session, reason="")
    if claimed is None and session.host == sessions.ledger.host:
        await sessions.computers.hand_over(session)
    if claimed is None:
        taken = await sessions.recovery.claim(session, join=False)
        assert not isinstance(taken, Live)
        claimed = taken
    return claimed
