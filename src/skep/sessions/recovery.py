"""Bring the computer of a session up: claim it, look what is there, and take the one step that helps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from skep.errors import (
    DatabaseBusy,
    LeaseLost,
    NotFound,
    SandboxLost,
    SkepError,
    StoreUnavailable,
    Unavailable,
    WorkspaceBusy,
    WorkspaceDamaged,
)
from skep.sandbox.sandbox import Sandbox
from skep.sessions.computers import Computers, Held
from skep.sessions.controller import owner
from skep.sessions.diagnosis import REASONS, Sight, Step, choose
from skep.sessions.ledger import Ledger
from skep.sessions.live import Live
from skep.sessions.session import Session
from skep.state.events import WorkspaceRepaired

T = TypeVar("T")


#: Unavailable for other reasons than that no sandbox can be had.
_OTHERWISE = (DatabaseBusy, LeaseLost, StoreUnavailable)
#: Puts on record that a step is taken; returns the session as it is then.
Record = Callable[[], Coroutine[Any, Any, Session]]
#: Such a record that is being made; None when it has been.
Recording: TypeAlias = "asyncio.Task[Session] | None"
#: Says whether to go on trying although no sandbox can be had.
Persist = Callable[[Unavailable], Awaitable[bool]]


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a computer is waited for in all, and how often it is looked at meanwhile."""

    limit_s: float = 60.0
    look_s: float = 0.2
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = _loop_time


class Recovery:
    """Brings computers up for one controller."""

    def __init__(self, ledger: Ledger, computers: Computers, pace: Pace) -> None:
        self._ledger = ledger
        self._computers = computers
        self._pace = pace

    async def bring_up(self, wanted: Session, *, may_recreate: bool, persist: Persist, join: bool = True) -> Live:
        """Return the running computer of a session: one of this process's own, or that of another one, joined.

        Without `join` one that another process has is `WorkspaceBusy`.
        `persist` is asked, whenever no sandbox can be had, whether to go on trying. What fails leaves the session in
        `error`, with the reason, and free for whoever tries next.
        """
        claimed = await self.claim(wanted) if join else await self._claim_now(wanted)
        if isinstance(claimed, Live):
            return claimed
        session = claimed
        recording: Recording = None
        try:
            step, record = await self._decide(session, may_recreate=may_recreate)
            # While the disk is waited for, a sandbox that only has to start is on its way; the others wait for both.
            recording = asyncio.create_task(record())
            if step != "start":
                session, recording = await self._take(step, await recording), None
            return await self._start(session, persist, recording)
        except SkepError as error:
            await self.give_up(await _as_recorded(session, recording), error)
            raise
        except BaseException:
            await asyncio.shield(self._let_go(session, recording))  # whoever asked has gone
            raise

    async def _let_go(self, session: Session, recording: Recording) -> None:
        await self._ledger.release(await _as_recorded(session, recording))

    async def claim(self, wanted: Session, *, join: bool = True) -> Session | Live:
        """Take a session for this controller, or join the one that has it; wait for one that is just taking it.

        Without `join` whoever has it on this host is asked to let it go.
        """
        deadline = self._pace.clock() + self._pace.limit_s
        while True:
            session = await self._ledger.claim(wanted, reason=REASONS["make"])
            if session is not None:
                return session
            there = await self._ledger.get(wanted.id)
            here = there.host == self._ledger.host
            if join and here and there.status == "active" and (live := await self._joined(there)) is not None:
                return live
            if here and not join:
                with suppress(Unavailable):
                    await self._computers.hand_over(there)
            if self._pace.clock() >= deadline:
                raise Unavailable(
                    f"the session of {there.key} is run by another process, on {there.host}: {there.controller}",
                    hint="ask that host, or try again when it has let the session go",
                )
            await self._pace.pause(self._pace.look_s / 4)

    async def _claim_now(self, wanted: Session) -> Session:
        session = await self._ledger.claim(wanted, reason=REASONS["make"])
        if session is None:
            there = await self._ledger.get(wanted.id)
            process = owner(there.controller or "")
            who = f"process {process.pid} on {process.host}" if process else "another process"
            raise WorkspaceBusy(f"the session of {there.key} is in use by {who}", hint="wait for its end")
        return session

    async def _joined(self, session: Session) -> Live | None:
        ending = AsyncExitStack()
        try:
            sandbox = await ending.enter_async_context(self._computers.join(session))
        except (Unavailable, NotFound):
            await ending.aclose()
            return None  # it has gone, or let it go, this very moment
        try:
            # Another process may have taken it over in between; the one that was joined waits for its guests.
            return Live(await self._ledger.get(session.id), sandbox, None, ending, self._ledger.now)
        except BaseException:
            await ending.aclose()
            raise

    async def _decide(self, session: Session, *, may_recreate: bool) -> tuple[Step, Record]:
        """Choose the step after which there is a workspace to start a sandbox over, and how to put it on record."""
        if session.status == "destroyed":
            await self._computers.destroy(session)  # whoever deleted it may not have come to the end
        sight = Sight(
            session.status,
            await self._computers.condition(session),
            has_run=session.generation > 0,
            archived=session.archive is not None,
            may_recreate=may_recreate,
        )
        step = choose(sight)
        if step == "refuse":
            raise _missing(session)
        if step != "make":
            return step, partial(self._ledger.change, session, "resuming", reason=self._reason(step, sight))
        if session.status == "creating" and not sight.has_run:
            return step, partial(_unchanged, session)
        # From here on there is nothing to lose, whoever has to finish this.
        rooms = {} if session.status == "destroyed" else session.rooms
        anew = {"generation": 0, "archive": None, "rooms": rooms}
        return step, partial(self._ledger.change, session, "creating", reason=self._reason(step, sight), **anew)

    def _reason(self, step: Step, sight: Sight) -> str:
        if step == "make" and sight.has_run and sight.status != "destroyed":
            return "its workspace was missing, and may be made anew"
        return REASONS[step]

    async def _take(self, step: Step, session: Session) -> Session:
        match step:
            case "make":
                await self._computers.make(session)
            case "unarchive":
                await self._computers.unarchive(session, session.archive or "")
                now = self._ledger.now()
                return await self._ledger.note(session, unarchived_at=now, warned_at=None, host=self._ledger.host)
            case "mend":
                mended = await self._computers.mend(session)
                await self._ledger.record(session, WorkspaceRepaired(done=mended.done, left=mended.lost))
                if await self._computers.condition(session) != "ready":
                    raise WorkspaceDamaged(
                        f"the workspace of {session.key} is damaged, and could not be repaired",
                        hint=f"skep workspace health {session.id} says what is wrong with it",
                    )
        return session

    async def _start(self, session: Session, persist: Persist, recording: Recording) -> Live:
        ending = AsyncExitStack()
        try:
            held = await self._patiently(lambda: ending.enter_async_context(self._computers.hold(session)))
            live = Live(session, await self._sandbox(held, persist), held, ending, self._ledger.now)
            await self.until_healthy(live)
            now = self._ledger.now()
            live.session = await self._ledger.change(
                await _as_recorded(session, recording),
                "active",
                reason="its computer answers",
                generation=session.generation + 1,
                host=self._ledger.host,
                archive=None,  # it no longer holds all that the workspace does
                active_at=now,
                healthy_at=now,
                resume_fail_count=0,
                last_error=None,
            )
        except BaseException:
            await ending.aclose()
            raise
        return live

    async def _sandbox(self, held: Held, persist: Persist) -> Sandbox:
        while True:
            try:
                return await held.sandbox()
            except _OTHERWISE:
                raise
            except Unavailable as error:
                if not await persist(error):
                    raise
            await self._pace.pause(self._pace.look_s)

    async def _patiently(self, take: Callable[[], Awaitable[T]]) -> T:
        """Wait for another process that has the workspace for a moment, or is about to end."""
        deadline = self._pace.clock() + self._pace.limit_s
        while True:
            try:
                return await take()
            except WorkspaceBusy:
                if self._pace.clock() >= deadline:
                    raise
            await self._pace.pause(self._pace.look_s)

    async def until_healthy(self, live: Live) -> None:
        """Wait until the computer answers, looking again and again; one that stays silent is restarted once."""
        deadline = self._pace.clock() + self._pace.limit_s
        restarted = False
        while not await live.answers():
            if self._pace.clock() >= deadline:
                raise SandboxLost(
                    f"the computer of {live.session.key} does not answer", hint="its files are safe; try again"
                )
            if not restarted or not await live.sandbox.alive():
                restarted = True
                await live.restart()
            await self._pace.pause(self._pace.look_s)

    async def give_up(self, session: Session, error: SkepError) -> None:
        """Put a failure on record and let the session go, so that another may try."""
        failure = {"last_error": error.message, "resume_fail_count": session.resume_fail_count + 1}
        if session.status == "destroyed":  # which it stays, as there is nothing to come back to
            session = await self._ledger.note(session, **failure)
        else:
            session = await self._ledger.change(session, "error", reason=error.message, **failure)
        await self._ledger.release(session)


async def _unchanged(session: Session) -> Session:
    return session


async def _as_recorded(session: Session, recording: Recording) -> Session:
    """Return a session as it is once the step that is taken with it is on record, if it could be recorded."""
    if recording is None:
        return session
    await asyncio.wait([recording])
    return session if recording.cancelled() else recording.result()


def _missing(session: Session) -> WorkspaceDamaged:
    return WorkspaceDamaged(
        f"the workspace of {session.key} is missing from {session.host or 'its host'}",
        hint="bring it back to its place or restore it from a backup of the home folder; only if it is lost for good: "
        f"skep session resolve {session.id} --recreate",
    )
