"""Put away what nobody uses, by each hive's upkeep, and finish what controllers that died left undone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal

import structlog

from skep.errors import LeaseLost, NotFound, SkepError
from skep.sessions import putting_away
from skep.sessions.idle import Due, deleted_at, due
from skep.sessions.putting_away import Changed
from skep.sessions.session import RUNNING, Session
from skep.state.events import SessionWarned
from skep.state.record import write_time

if TYPE_CHECKING:
    from skep.sessions.live import Live
    from skep.sessions.sessions import Sessions
    from skep.state.hives import Hive, Hives
    from skep.state.leases import Lease, Leases
    from skep.state.upkeep import Upkeep

Act = Due | Literal["finish", "leave", "drop"]

_NAME = "reaper"
_TTL_S = 60.0
_ROUND_S = 5.0
#: How long one round packs away and deletes, so that the next one stops in time what is idle by then.
_HEAVY_S = 20.0
#: A session with which something went wrong is left alone for so long.
_LEFT = timedelta(minutes=1)
#: How far the use of a running session may be behind on record.
_BEHIND = timedelta(seconds=30)
#: How long a process stays in the computer of another without using it.
_GUEST = timedelta(seconds=10)


@dataclass(slots=True)
class Round:
    """What one round of the reaper did, by session, and what it could not do."""

    done: dict[str, Act] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Reaper:
    """Looks after the sessions of one host. Of several processes that have one, one goes round at a time."""

    def __init__(self, sessions: Sessions, hives: Hives, leases: Leases) -> None:
        self._sessions = sessions
        self._ledger = sessions.ledger
        self._hives = hives
        self._leases = leases
        self._left: dict[str, datetime] = {}

    async def run(self) -> None:
        """Go round again and again, until it is cancelled. Most commands end before the first round."""
        log = structlog.get_logger("skep.reaper")
        while True:
            await self._rest()
            try:
                did = await self.go_round()
            except SkepError as error:
                log.warning("round_failed", problem=error.message)
            else:
                if did is not None and (did.done or did.failed):
                    log.info("round", done=did.done, failed=did.failed)

    async def _rest(self) -> None:
        """Wait for the next round, which comes at once when others may have taken over what this process runs."""
        if self._ledger.lost.is_set():
            await asyncio.sleep(_ROUND_S)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ledger.lost.wait(), _ROUND_S)

    async def go_round(self) -> Round | None:
        """Do what is due on this host, and say what was done; None while another process of the host does.

        A process sees only of its own computers whether they are busy, so each looks after its own; what is left by
        processes that died, and what does not run, is anybody's.
        """
        did = Round()
        await self._drop_overtaken(did)
        name = f"{_NAME}:{self._ledger.host}"
        lease = await self._leases.acquire(name, holder=self._ledger.holder, ttl_s=_TTL_S)
        if lease is None:
            return did if did.done else None
        try:
            await self._work(lease, did)
        except LeaseLost:
            pass  # something took long, and another process goes round by now
        finally:
            await self._leases.release(lease)
        return did

    async def _drop_overtaken(self, did: Round) -> None:
        """End computers whose sessions another process took over, while this one slept: it waits for the workspace."""
        running = self._sessions.running()
        overtaken = await self._ledger.overtaken([live.session for live in running]) if running else set()
        for live in running:
            if live.session.id in overtaken and await putting_away.drop(self._sessions, live):
                did.done[live.session.id] = "drop"

    async def _work(self, lease: Lease, did: Round) -> None:
        hives = {hive.id: hive for hive in await self._hives.list(deleted=True)}
        heavy: list[tuple[Session, Hive]] = []
        for session in await self._ledger.kept(self._ledger.host):
            hive = hives.get(session.hive_id)  # one made this very moment is not there yet
            if hive is None or self._left.get(session.id, self._ledger.now()) > self._ledger.now():
                continue
            if session.status in RUNNING:
                await self._look_after(session, hive, did)
            else:
                heavy.append((session, hive))
        began = _clock()
        for session, hive in heavy:
            if _clock() - began < _HEAVY_S and await self._look_after(session, hive, did):
                await self._leases.renew(lease, _TTL_S)

    async def _look_after(self, session: Session, hive: Hive, did: Round) -> bool:
        """Do what is due for one session; say whether anything was tried."""
        try:
            act = await self._choose(session, hive.upkeep)
            if act is None:
                return False
            await self._do(act, session, hive)
            did.done[session.id] = act
        except (Changed, LeaseLost, NotFound):
            pass  # it is used again, has become another's, or is gone
        except SkepError as error:
            did.failed[session.id] = error.message
            self._left[session.id] = self._ledger.now() + _LEFT
        return True

    async def _choose(self, session: Session, upkeep: Upkeep) -> Act | None:
        if (live := self._sessions.live(session.id)) is not None:
            return await self._choose_for_live(live, upkeep)
        if session.status != "stopped" and await self._is_unfinished(session):
            return "finish"
        if session.status in RUNNING or not session.generation:
            return None  # what has never run holds nothing to pack away
        return due(session, upkeep, self._ledger.now())

    async def _is_unfinished(self, session: Session) -> bool:
        if session.status in RUNNING:
            return await self._ledger.is_orphan(session)
        if session.controller == self._ledger.controller:
            return True  # it could not be done before, or is just being done
        return session.controller is not None and await self._ledger.is_orphan(session)

    async def _choose_for_live(self, live: Live, upkeep: Upkeep) -> Act | None:
        await live.tidy()
        busy = await live.busy()
        if not live.joined and live.used_at - live.session.active_at >= _BEHIND:
            used_at = live.used_at
            await self._ledger.note(live.session, active_at=used_at)
            live.session = replace(live.session, active_at=used_at)
        if live.joined:
            return "leave" if not busy and self._is_idle_guest(live.used_at) else None
        used = replace(live.session, active_at=live.used_at)
        return due(used, upkeep, self._ledger.now(), busy=busy)

    def _is_idle_guest(self, used_at: datetime) -> bool:
        """Say whether this process should leave the computer of another, which cannot end before."""
        return self._ledger.now() - used_at >= _GUEST

    async def _do(self, act: Act, session: Session, hive: Hive) -> None:
        upkeep, sessions = hive.upkeep, self._sessions
        still = partial(self._is_still, act, upkeep)
        match act:
            case "stop":
                reason = f"nobody used it for {upkeep.stop_after_s} s"
                await putting_away.stop(sessions, session.id, reason=reason, still=still)
            case "leave":
                await putting_away.leave(sessions, session.id, still=still)
            case "archive":
                reason = f"it was stopped for {upkeep.archive_after_s} s"
                await putting_away.archive(sessions, session.id, reason=reason, still=still)
            case "warn":
                await self._warn(session, upkeep)
            case "delete":
                reason = f"nobody used it for {upkeep.delete_after_days} days, which was announced"
                await putting_away.delete(sessions, session.id, reason=reason, still=still)
            case "finish":
                await self._finish(session)

    def _is_still(self, act: Act, upkeep: Upkeep, session: Session) -> bool:
        if act == "leave":
            return self._is_idle_guest(session.active_at)
        return due(session, upkeep, self._ledger.now()) == act

    async def _finish(self, session: Session) -> None:
        """Bring to its end what a process was about when it died. Its sandbox has ended with it."""
        reason = "the process that ran it died"

        def still(now: Session) -> bool:
            return now.status == session.status

        finish: Mapping[str, putting_away.Act] = {"archived": putting_away.archive, "destroyed": putting_away.delete}
        await finish.get(session.status, putting_away.stop)(self._sessions, session.id, reason=reason, still=still)

    async def _warn(self, session: Session, upkeep: Upkeep) -> None:
        async with self._sessions.turn(session.id):
            claimed = await putting_away.claim_if(self._sessions, session.id, partial(self._is_still, "warn", upkeep))
            at = write_time(deleted_at(claimed, upkeep))
            event = SessionWarned(session=session.id, key=session.key, delete_at=at)
            await self._ledger.record(claimed, event, warned_at=self._ledger.now(), controller=None)


def _clock() -> float:
    return asyncio.get_running_loop().time()
