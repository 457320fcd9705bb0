"""Put away what nobody uses, by each hive's upkeep, and finish what controllers that died left undone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from skep.errors import LeaseLost, NotFound, SkepError, Unavailable
from skep.sessions import putting_away
from skep.sessions.idle import Due, deleted_at, due
from skep.sessions.session import RUNNING, Session
from skep.state.events import SessionWarned
from skep.state.record import write_time

if TYPE_CHECKING:
    from skep.sessions.sessions import Sessions
    from skep.state.hives import Hive, Hives
    from skep.state.leases import Leases

_NAME = "reaper"
_TTL_S = 60.0
_ROUND_S = 5.0


@dataclass(slots=True)
class Round:
    """What one round of the reaper did, by session, and what it could not do."""

    done: dict[str, Due | str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Reaper:
    """Looks after the sessions of one host."""

    def __init__(self, sessions: Sessions, hives: Hives, leases: Leases) -> None:
        self._sessions = sessions
        self._hives = hives
        self._leases = leases

    async def run(self) -> None:
        """Go round again and again, until it is cancelled."""
        log = structlog.get_logger("skep.reaper")
        while True:
            try:
                did = await self.go_round()
            except Unavailable as error:
                log.warning("round_failed", problem=error.message)
            else:
                if did is not None and (did.done or did.failed):
                    log.info("round", done=did.done, failed=did.failed)
            await asyncio.sleep(_ROUND_S)

    async def go_round(self) -> Round | None:
        """Do all that is due on this host; None while another process of it does."""
        ledger = self._sessions.ledger
        lease = await self._leases.acquire(f"{_NAME}:{ledger.host}", holder=ledger.holder, ttl_s=_TTL_S)
        if lease is None:
            return None
        did = Round()
        try:
            hives = {hive.id: hive for hive in await self._hives.list(deleted=True)}
            for session in await ledger.list():
                lease = await self._leases.renew(lease, _TTL_S)
                if session.host == ledger.host:
                    await self._look_after(session, hives[session.hive_id], did)
        finally:
            await self._leases.release(lease)
        return did

    async def _look_after(self, session: Session, hive: Hive, did: Round) -> None:
        try:
            act = await self._due(session, hive)
            if act is not None:
                await self._do(act, session, hive)
                did.done[session.id] = act
        except (LeaseLost, NotFound):
            pass  # it has become somebody else's, or is gone
        except SkepError as error:
            did.failed[session.id] = error.message

    async def _due(self, session: Session, hive: Hive) -> Due | str | None:
        live = self._sessions.live(session.id)
        if session.status in RUNNING and live is None:
            return "orphan" if await self._sessions.ledger.is_orphan(session) else None
        if live is not None:
            busy = await live.busy()
            live.session = await self._sessions.ledger.note(live.session, active_at=live.used_at)
            return due(live.session, hive.upkeep, self._sessions.ledger.now(), busy=busy)
        return due(session, hive.upkeep, self._sessions.ledger.now())

    async def _do(self, act: Due | str, session: Session, hive: Hive) -> None:
        match act:
            case "stop":
                reason = f"nobody used it for {hive.upkeep.stop_after_s} s"
                await putting_away.stop(self._sessions, session.id, reason=reason)
            case "archive":
                reason = f"it was stopped for {hive.upkeep.archive_after_s} s"
                await putting_away.archive(self._sessions, session.id, reason=reason)
            case "warn":
                await self._warn(session, hive)
            case "delete":
                reason = f"nobody used it for {hive.upkeep.delete_after_days} days, which was announced"
                await putting_away.delete(self._sessions, session.id, reason=reason)
            case _:
                await putting_away.stop(self._sessions, session.id, reason="the process that ran it died")

    async def _warn(self, session: Session, hive: Hive) -> None:
        ledger = self._sessions.ledger
        claimed = await ledger.claim(session, reason="")
        if claimed is None:
            return
        at = write_time(deleted_at(session, hive.upkeep))
        await ledger.record(claimed, SessionWarned(session=session.id, key=session.key, delete_at=at))
        await ledger.note(claimed, warned_at=ledger.now(), controller=None)
