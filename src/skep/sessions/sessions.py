"""Find the computer of a conversation again, whatever happened to it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

from skep.errors import Denied, SandboxDisabled, SandboxLost, Unavailable, WorkspaceBusy
from skep.sandbox.sandbox import Sandbox
from skep.sessions.computer import Computer, Kind
from skep.sessions.computers import Computers
from skep.sessions.key import key_of, session_id
from skep.sessions.ledger import Ledger, Standing
from skep.sessions.live import Live
from skep.sessions.outages import TRY_AGAIN, Outage, Outages
from skep.sessions.recovery import Pace, Recovery
from skep.sessions.session import Session
from skep.state.events import AccessDenied, PackagesInstalled, RoomReplaced
from skep.state.hives import Hive

if TYPE_CHECKING:
    from skep.workspace.packages.packages import Installed

T = TypeVar("T")
#: Says why a hive may have no sandbox at all, None if it may.
Off = Callable[[Hive], Awaitable[SandboxDisabled | None]]
#: Says whether a sandbox that runs isolates as much as the hive demands by now.
Suits = Callable[[Hive, Sandbox], bool]

#: How long the use of a session may be behind on record.
_NOTE_USE = timedelta(seconds=30)


class Sessions:
    """The sessions that this process runs, and the way to all others."""

    def __init__(
        self,
        ledger: Ledger,
        computers: Computers,
        outages: Outages,
        *,
        pace: Pace | None = None,
        off: Off | None = None,
        suits: Suits = lambda _, __: True,
    ) -> None:
        self.ledger = ledger
        self.computers = computers
        self._outages = outages
        self._off = off
        self._suits = suits
        self.recovery = Recovery(ledger, computers, pace or Pace())
        self._live: dict[str, Live] = {}
        #: When a sandbox was last tried for a hive that has to do without.
        self._tried: dict[str, datetime] = {}
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def resolve(self, hive: Hive, thread: str, *, account_id: str, recreate: bool = False) -> Computer:
        """Return the computer of a thread, up and answering, and always the one that it had before.

        A workspace that is missing is not made anew, unless `recreate` or the hive's upkeep says that it may be.
        When no sandbox can be had for a minute, or the hive may have none, the computer that is returned has none, and
        says so.
        """
        return await self.open(hive, self.wanted(hive, thread), account_id=account_id, recreate=recreate)

    async def open(
        self, hive: Hive, wanted: Session, *, account_id: str, recreate: bool = False, join: bool = True
    ) -> Computer:
        """Return the computer of a session of this hive, as `resolve` does for a thread.

        Without `join` one that another process runs is `WorkspaceBusy`.
        """
        if account_id != wanted.account_id:
            await self._deny(account_id, wanted, "resolve")  # without a wait for its turn
        async with self.acting(wanted.id):
            standing = await self._standing(account_id, wanted, "resolve")
            if self._off is not None and (refusal := await self._off(hive)) is not None:
                return self._computer(None, wanted, account_id, down=refusal)
            live = self._live.get(wanted.id)
            if (
                live is None
                or not self._suits(hive, live.sandbox)
                or not await self._still_good(live, standing.session)
            ):
                await self._drop(wanted.id)
                outage = await self._outages.of(hive) if standing.outage else None
                live, down = await self._bring_up(hive, wanted, outage, recreate=recreate, join=join)
                if live is None:
                    return self._computer(None, wanted, account_id, down=down)
                await self._require_suited(hive, live)
            return self._computer(live, live.session, account_id)

    async def attempt(self, hive: Hive, thread: str, work: Callable[[Computer], Awaitable[T]], *, account_id: str) -> T:
        """Do work on the computer of a thread, and once more if the computer was lost and could be brought back."""
        computer = await self.resolve(hive, thread, account_id=account_id)
        try:
            return await work(computer)
        except SandboxLost:
            computer = await self.resolve(hive, thread, account_id=account_id)
        return await work(computer)

    def wanted(self, hive: Hive, thread: str) -> Session:
        """Return what the session of a thread is like before it is on record."""
        key, now = key_of(hive, thread), self.ledger.now()
        found = session_id(hive.account_id, hive.id, key)
        return Session(found, hive.account_id, hive.id, key, "creating", now, now, now)

    def turn(self, session_id: str) -> asyncio.Lock:
        """Return the lock under which this process changes anything about a session."""
        return self._turns.setdefault(session_id, asyncio.Lock())

    @asynccontextmanager
    async def acting(self, session_id: str) -> AsyncIterator[None]:
        """Have the turn of a session. What is broken off leaves it to others, unless its computer runs on here."""
        async with self.turn(session_id):
            try:
                yield
            except BaseException:
                live = self._live.get(session_id)
                if live is None or live.joined:
                    with suppress(Unavailable):  # then it is free when this process ends
                        await asyncio.shield(self.ledger.abandon(session_id))
                raise

    def live(self, session_id: str) -> Live | None:
        """Return the computer of a session if it runs in this process."""
        return self._live.get(session_id)

    def forget(self, session_id: str) -> Live | None:
        return self._live.pop(session_id, None)

    def running(self) -> tuple[Live, ...]:
        return tuple(self._live.values())

    async def _still_good(self, live: Live, row: Session | None) -> bool:
        """Say whether a computer of this process answers, and is still this process's to use."""
        if row is None or row.token != live.session.token:
            return False
        if not live.joined and row.status not in ("active", "paused"):
            return False
        if row.status == "paused":
            if live.joined:
                return False  # whoever has it wakes it
            await self._wake(live)
        if not await live.healthy():
            return False
        if not live.joined and self.ledger.now() - row.active_at > _NOTE_USE:
            now = self.ledger.now()
            await self.ledger.note(live.session, active_at=now)
            live.session = replace(live.session, active_at=now)
        return True

    async def _require_suited(self, hive: Hive, live: Live) -> None:
        """Leave the sandbox of another process that was started when the hive demanded less isolation."""
        if not self._suits(hive, live.sandbox):
            await self._drop(live.session.id)
            raise WorkspaceBusy(
                f"the computer of {live.session.key} runs with less isolation than its hive demands by now",
                hint=f"wait for the end of what runs in it, or: skep session stop {live.session.id}",
            )

    async def _wake(self, live: Live) -> None:
        await live.sandbox.resume()
        live.session = await self.ledger.change(live.session, "active", reason="it is used again")

    async def _drop(self, session_id: str) -> None:
        """End what this process has of a session, before it is brought up again."""
        if (live := self.forget(session_id)) is not None:
            await live.end()

    async def _bring_up(
        self, hive: Hive, wanted: Session, outage: Outage | None, *, recreate: bool, join: bool
    ) -> tuple[Live | None, str]:
        """Bring a computer up; while none can be had try again for a minute, and then go on without."""
        now = self.ledger.now()
        if outage is not None and outage.flipped_at and now - self._tried.get(hive.id, outage.flipped_at) < TRY_AGAIN:
            return None, outage.last_error
        self._tried[hive.id] = now

        async def persist(error: Unavailable) -> bool:
            nonlocal outage
            outage = await self._outages.failed(hive, error)
            self._tried[hive.id] = self.ledger.now()
            return outage.flipped_at is None

        may_recreate = recreate or hive.upkeep.recreate_missing
        try:
            live = await self.recovery.bring_up(wanted, may_recreate=may_recreate, persist=persist, join=join)
        except Denied:  # what lies in the place of its workspace was made for another
            event = AccessDenied(session=wanted.id, asked_by=wanted.account_id, act="hold")
            await self.ledger.remark(wanted, event)
            raise
        except Unavailable as error:
            if outage is None or outage.flipped_at is None:
                raise
            return None, error.message
        self._live[wanted.id] = live
        if outage is not None:
            await self._outages.over(hive)
        return live, ""

    async def require(self, account_id: str, session: Session, act: str) -> Session | None:
        """Refuse whoever is not of the account that has the session now; return the session as it is on record."""
        return (await self._standing(account_id, session, act)).session

    async def _standing(self, account_id: str, session: Session, act: str) -> Standing:
        standing = await self.ledger.standing(session)
        row = standing.session
        if {account_id} != {standing.owner, session.account_id, row.account_id if row else account_id}:
            await self._deny(account_id, session, act)
        return standing

    async def _deny(self, account_id: str, session: Session, act: str) -> NoReturn:
        """Put on record that somebody asked for what is not theirs, and refuse it."""
        event = AccessDenied(session=session.id, asked_by=account_id[:128], act=act)
        await self.ledger.remark(session, event)
        raise Denied(
            f"the session of {session.key} is not one of the account {account_id[:60]!a}",
            hint="use a hive of your own account that was not deleted",
        )

    def _computer(
        self, live: Live | None, session: Session, account_id: str, *, down: str | SandboxDisabled | None = None
    ) -> Computer:
        async def check(act: str) -> None:
            row = await self.require(account_id, session, act)
            if live is None:
                return
            if row is None or row.token != live.session.token:
                raise SandboxLost(
                    f"the computer of {session.key} is run by another process now", hint="resolve the key again"
                )
            if row.status == "paused" and not live.joined:
                async with self.turn(session.id):
                    if live.session.status == "paused":
                        await self._wake(live)

        return Computer(live, check, self._open_room, install=partial(self._install, session), down=down)

    async def _install(self, session: Session, *, python: Sequence[str], node: Sequence[str]) -> Installed:
        done = await self.computers.install(session, python=python, node=node)
        await self.ledger.remark(session, PackagesInstalled(python=tuple(python), node=tuple(node)))
        return done

    async def _open_room(self, live: Live, kind: Kind, name: str) -> bool:
        """Take note of a shell or a context that is opened; say whether it takes the place of one that is gone."""
        session, room = live.session, f"{kind}:{name}"
        replaced = room in session.rooms
        if live.joined:
            return replaced
        rooms = {**session.rooms, room: session.generation}
        if replaced:
            event = RoomReplaced(session=session.id, kind=kind, name=name)
            await self.ledger.record(session, event, rooms=rooms)
        else:
            await self.ledger.note(session, rooms=rooms)
        live.session = replace(live.session, rooms=rooms)  # of which something else may have been noted meanwhile
        return replaced
