"""The record of sessions: who may write it, and that every change of status is an event.

A session belongs to the controller that last claimed it. Each claim makes its token larger, and a controller writes
only with the token that it was given, in one transaction with its own lease: one that slept through a take-over is
refused, whatever it still believes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import RowMapping, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import Defect, LeaseLost, NotFound
from skep.sessions.controller import Controller, owner
from skep.sessions.session import KEPT, WAYS, Session, Status
from skep.state.accounts import utc_now
from skep.state.database import Database
from skep.state.events import Event, SessionChanged
from skep.state.leases import clock
from skep.state.log import EventLog
from skep.state.record import read_time, write_time
from skep.state.schema import hives, leases, outages, sessions
from skep.state.writer import Alongside

ACTOR = "skep:sessions"

#: Changes that are found by looking at the row in the same transaction.
_TIMES = ("created_at", "changed_at", "active_at", "healthy_at", "unarchived_at", "warned_at")


@dataclass(frozen=True, slots=True)
class Standing:
    """Whose the hive of a session is, None if there is none any more; and the session, if it is on record."""

    owner: str | None
    session: Session | None
    #: Whether sandboxes could not be had for the hive when they were last tried.
    outage: bool = False


class Roll:
    """The sessions in a database, to be read by whoever."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, session_id: str) -> Session | None:
        async with self._database.read() as connection:
            row = (await connection.execute(select(sessions).where(sessions.c.id == session_id))).one_or_none()
        return None if row is None else _session(row._mapping)

    async def overtaken(self, held: Sequence[Session]) -> set[str]:
        """Return the ids of those sessions that somebody else has claimed since."""
        statement = select(sessions.c.id, sessions.c.token).where(sessions.c.id.in_([one.id for one in held]))
        async with self._database.read() as connection:
            tokens = {row.id: row.token for row in (await connection.execute(statement)).all()}
        return {one.id for one in held if tokens.get(one.id) != one.token}

    async def get(self, session_id: str) -> Session:
        found = await self.find(session_id)
        if found is None:
            raise NotFound(f"there is no session {session_id}", hint="list them with: skep session list")
        return found

    async def list(
        self, *, account_id: str | None = None, hive_id: str | None = None, statuses: Sequence[Status] = ()
    ) -> tuple[Session, ...]:
        """Return sessions, those used last first."""
        statement = select(sessions).order_by(sessions.c.active_at.desc(), sessions.c.id)
        if account_id is not None:
            statement = statement.where(sessions.c.account_id == account_id)
        if hive_id is not None:
            statement = statement.where(sessions.c.hive_id == hive_id)
        if statuses:
            statement = statement.where(sessions.c.status.in_(statuses))
        async with self._database.read() as connection:
            return tuple(_session(row._mapping) for row in (await connection.execute(statement)).all())

    async def kept(self, host: str) -> tuple[Session, ...]:
        """Return the sessions of a host about which something may have to be done, those used longest ago first."""
        undone = (sessions.c.status == "destroyed") & sessions.c.controller.is_not(None)
        statement = (
            select(sessions)
            .where(sessions.c.host == host, sessions.c.status.in_(KEPT) | undone)
            .order_by(sessions.c.active_at, sessions.c.id)
        )
        async with self._database.read() as connection:
            return tuple(_session(row._mapping) for row in (await connection.execute(statement)).all())


class Ledger(Roll):
    """The sessions in a database, for one controller."""

    def __init__(
        self, database: Database, log: EventLog, controller: Controller, *, now: Callable[[], datetime] = utc_now
    ) -> None:
        super().__init__(database)
        self._log = log
        self._controller = controller
        self.now = now

    @property
    def host(self) -> str:
        return self._controller.identity.host

    @property
    def holder(self) -> str:
        return str(self._controller.identity)

    @property
    def lost(self) -> asyncio.Event:
        """Set when another process may have taken over what this one held."""
        return self._controller.lost

    @property
    def controller(self) -> str:
        return self._controller.name

    def check(self) -> None:
        """Raise Unavailable if others may take this process for dead."""
        self._controller.check()

    async def is_orphan(self, session: Session) -> bool:
        """Say whether the controller of a session is gone."""
        async with self._database.read() as connection:
            return session.controller != self._controller.name and await self._is_free(connection, session)

    async def standing(self, session: Session) -> Standing:
        """Read what decides whether somebody may use a session, in one go."""
        both = (sessions.c.hive_id == hives.c.id) & (sessions.c.id == session.id)
        statement = (
            select(hives.c.account_id.label("owner"), hives.c.deleted_at, outages.c.since, sessions)
            .select_from(hives.outerjoin(sessions, both).outerjoin(outages, outages.c.hive_id == hives.c.id))
            .where(hives.c.id == session.hive_id)
        )
        async with self._database.read() as connection:
            row = (await connection.execute(statement)).one_or_none()
        if row is None:
            return Standing(None, None)
        values = dict(row._mapping)
        owner, deleted_at, since = values.pop("owner"), values.pop("deleted_at"), values.pop("since")
        found = None if values["id"] is None else _session(values)
        return Standing(None if deleted_at else owner, found, outage=since is not None)

    async def claim(self, wanted: Session, *, reason: str) -> Session | None:
        """Take a session for this controller, made if it is not on record; None while another controller has it.

        `wanted` says what a new one is like. One that a controller left behind when it died is taken over.
        """
        async with self._database.write() as connection:
            await self._controller.guard(connection)
            row = (await connection.execute(_locked(wanted.id))).one_or_none()
            if row is not None:
                return await self._taken(connection, _session(row._mapping))
        made = await self._made(wanted, reason)
        return await self.claim(wanted, reason=reason) if made is None else made

    async def _taken(self, connection: AsyncConnection, found: Session) -> Session | None:
        if not await self._is_free(connection, found):
            return None
        taken = replace(found, token=found.token + 1, controller=self._controller.name)
        await connection.execute(_update(found, {"token": taken.token, "controller": taken.controller}))
        return taken

    async def _made(self, wanted: Session, reason: str) -> Session | None:
        """Put a new session on record; None if somebody else was faster."""
        made = replace(wanted, token=1, controller=self._controller.name, host=self._controller.identity.host)

        async def insert_row(connection: AsyncConnection) -> None:
            await self._controller.guard(connection)
            await connection.execute(insert(sessions).values(_row(made)))

        try:
            await self._append(made, _changed(made, None, "creating", reason), insert_row)
        except IntegrityError:
            return None
        return made

    async def change(self, session: Session, to: Status, *, reason: str, **changes: Any) -> Session:
        """Give a claimed session another status, and record why; the row and the event are one."""
        if to not in WAYS[session.status]:
            raise Defect(f"session {session.id} cannot become {to} from {session.status}")
        after = replace(session, status=to, changed_at=self.now(), **changes)
        await self._append(after, _changed(after, session.status, to, reason), partial(self._write, session, after))
        return after

    async def note(self, session: Session, **changes: Any) -> Session:
        """Change what is known of a claimed session without a change of status."""
        after = replace(session, **changes)
        async with self._database.write() as connection:
            await self._write(session, after, connection)
        return after

    async def release(self, session: Session) -> Session:
        """Give a session back, so that any controller may claim it at once."""
        return await self.note(session, controller=None)

    async def abandon(self, session_id: str) -> None:
        """Give a session back of which it is not known whether this controller has it, or how it is by now."""
        mine = (sessions.c.id == session_id, sessions.c.controller == self._controller.name)
        async with self._database.write() as connection:
            await connection.execute(update(sessions).where(*mine).values(controller=None))

    async def record(self, session: Session, event: Event, **changes: Any) -> Session:
        """Record something else that happened to a claimed session, and what is known of it since."""
        after = replace(session, **changes)
        await self._append(after, event, partial(self._write, session, after))
        return after

    async def remark(self, session: Session, event: Event) -> None:
        """Record something about a session that this controller need not have."""
        await self._log.append(event, hive_id=session.hive_id, account_id=session.account_id, actor=ACTOR)

    async def _append(self, session: Session, event: Event, write: Alongside) -> None:
        await self._log.append(
            event, hive_id=session.hive_id, account_id=session.account_id, actor=ACTOR, alongside=write
        )

    async def _write(self, before: Session, after: Session, connection: AsyncConnection) -> None:
        await self._controller.guard(connection)
        values = {name: value for name, value in _row(after).items() if value != _row(before)[name]}
        statement = _update(before, values or {"token": before.token})
        mine = (sessions.c.token == before.token, sessions.c.controller == self._controller.name)
        if not (await connection.execute(statement.where(*mine))).rowcount:
            raise LeaseLost(
                f"another controller has taken session {before.id} over",
                hint="stop acting on it, and resolve its key again",
            )

    async def _is_free(self, connection: AsyncConnection, session: Session) -> bool:
        if session.controller in (None, self._controller.name):
            return True
        process = owner(session.controller or "")
        if process is not None and process.is_dead(self._controller.identity):
            return True
        alive = select(leases.c.token).where(
            leases.c.name == session.controller,
            leases.c.holder.is_not(None),
            leases.c.expires_at > clock(self._database.dialect),
        )
        return (await connection.execute(alive)).one_or_none() is None


def _locked(session_id: str) -> Any:
    return select(sessions).where(sessions.c.id == session_id).with_for_update()


def _update(session: Session, values: dict[str, Any]) -> Any:
    return update(sessions).where(sessions.c.id == session.id).values(values)


def _changed(session: Session, before: Status | None, after: Status, reason: str) -> SessionChanged:
    return SessionChanged(
        session=session.id, key=session.key, before=before, after=after, reason=reason, generation=session.generation
    )


def _row(session: Session) -> dict[str, Any]:
    row = {name: getattr(session, name) for name in sessions.columns.keys()}  # noqa: SIM118 - not a dict
    for name in _TIMES:
        row[name] = None if row[name] is None else write_time(row[name])
    return {**row, "rooms": json.dumps(dict(session.rooms), sort_keys=True)}


def _session(row: Mapping[str, Any] | RowMapping) -> Session:
    values = dict(row)
    for name in _TIMES:
        values[name] = None if values[name] is None else read_time(values[name])
    return Session(**{**values, "rooms": json.loads(values["rooms"])})
