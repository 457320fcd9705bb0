"""Hives: made, found, configured and deleted, each act on record in the hive's own log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Row, Select, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import Conflict, InvalidRequest, NotFound
from skep.state.accounts import require_account, utc_now
from skep.state.database import Database
from skep.state.events import Event, HiveConfigured, HiveCreated, HiveDeleted
from skep.state.flags import DEFAULT, FLAGS, Flags
from skep.state.log import EventLog
from skep.state.names import check_name, is_hive_id, new_hive_id, shown
from skep.state.record import read_time, write_time
from skep.state.schema import hives
from skep.state.upkeep import UPKEEP, USUAL, Upkeep


@dataclass(frozen=True, slots=True)
class Hive:
    """One agent household; `flags` are as set, before the roll-out is asked."""

    id: str
    account_id: str
    name: str
    flags: Flags
    created_at: datetime
    deleted_at: datetime | None = None
    upkeep: Upkeep = USUAL


class Hives:
    """The hives of a database. An act and its record in the hive's log are one transaction."""

    def __init__(self, database: Database, log: EventLog, *, now: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self._log = log
        self._now = now

    async def create(self, name: str, *, account_id: str, actor: str, flags: Flags = DEFAULT) -> Hive:
        """Make a hive; raise Conflict if the account has one by that name."""
        if is_hive_id(check_name("hive name", name)):
            raise InvalidRequest(f"{name} reads like the id of a hive", hint="choose another name")
        async with self._database.read() as connection:
            await require_account(connection, account_id)
            if (await connection.execute(_find(name, account_id))).first():
                raise _taken(name, account_id)
        hive = Hive(new_hive_id(), account_id, name, flags, self._now())
        changes = flags.since(DEFAULT)
        happened: list[Event] = [HiveCreated(name=name)]
        if changes:
            happened.append(HiveConfigured(changes=dict(changes)))

        async def insert_row(connection: AsyncConnection) -> None:
            await require_account(connection, account_id, lock=True)
            await connection.execute(insert(hives).values(_row(hive)))

        try:
            await self._log.append_all(
                happened, hive_id=hive.id, account_id=account_id, actor=actor, alongside=insert_row
            )
        except IntegrityError as error:
            raise _taken(name, account_id) from error
        return hive

    async def list(self, *, account_id: str | None = None, deleted: bool = False) -> tuple[Hive, ...]:
        """Return the hives of an account, or of all, by account and name; with `deleted` the deleted too."""
        statement = select(hives).order_by(hives.c.account_id, hives.c.name, hives.c.created_at)
        if account_id is not None:
            statement = statement.where(hives.c.account_id == check_name("account id", account_id))
        if not deleted:
            statement = statement.where(hives.c.deleted_at.is_(None))
        async with self._database.read() as connection:
            return tuple(_hive(row) for row in (await connection.execute(statement)).all())

    async def show(self, reference: str, *, account_id: str, deleted: bool = False) -> Hive:
        """Find a hive of an account by its id or its name; a deleted one by its id alone, with `deleted`."""
        if not is_hive_id(reference):
            check_name("hive", reference)
        check_name("account id", account_id)
        async with self._database.read() as connection:
            rows = (await connection.execute(_find(reference, account_id, deleted=deleted))).all()
        if not rows:
            raise _missing(reference, account_id)
        return _hive(rows[0])

    async def configure(self, reference: str, changes: Mapping[str, object], *, account_id: str, actor: str) -> Hive:
        """Set flags and the upkeep of a hive and return it as it is then; nothing is recorded if nothing changes."""
        hive = await self.show(reference, account_id=account_id)
        upkeep = hive.upkeep.changed({name: value for name, value in changes.items() if name in UPKEEP})
        flags = hive.flags.changed({name: value for name, value in changes.items() if name not in UPKEEP})
        set_flags = flags.since(hive.flags)
        different = {**set_flags, **upkeep.since(hive.upkeep)}
        if not different:
            return hive
        values = {**set_flags, "upkeep": upkeep.text()}
        await self._act(hive, HiveConfigured(changes=dict(different)), values, actor=actor)
        return replace(hive, flags=flags, upkeep=upkeep)

    async def delete(self, reference: str, *, account_id: str, actor: str) -> Hive:
        """Delete a hive; its events stay, its id is never used again and its name is free."""
        hive = await self.show(reference, account_id=account_id)
        at = self._now()
        await self._act(hive, HiveDeleted(name=hive.name), {"deleted_at": write_time(at)}, actor=actor)
        return replace(hive, deleted_at=at)

    async def _act(self, hive: Hive, event: Event, values: Mapping[str, object], *, actor: str) -> None:
        statement = update(hives).where(hives.c.id == hive.id, hives.c.deleted_at.is_(None)).values(values)

        async def update_row(connection: AsyncConnection) -> None:
            if not (await connection.execute(statement)).rowcount:
                raise _missing(hive.name, hive.account_id)

        await self._log.append(event, hive_id=hive.id, account_id=hive.account_id, actor=actor, alongside=update_row)


def _row(hive: Hive) -> dict[str, object]:
    return {
        "id": hive.id,
        "account_id": hive.account_id,
        "name": hive.name,
        "created_at": write_time(hive.created_at),
        "upkeep": hive.upkeep.text(),
        **asdict(hive.flags),
    }


def _find(reference: str, account_id: str, *, deleted: bool = False) -> Select[tuple[Any, ...]]:
    by_id = is_hive_id(reference)
    column = hives.c.id if by_id else hives.c.name
    statement = select(hives).where(column == reference, hives.c.account_id == account_id)
    return statement if by_id and deleted else statement.where(hives.c.deleted_at.is_(None))


def _hive(row: Row[tuple[Any, ...]]) -> Hive:
    return Hive(
        id=row.id,
        account_id=row.account_id,
        name=row.name,
        flags=Flags(**{flag: getattr(row, flag) for flag in FLAGS}),
        created_at=read_time(row.created_at),
        deleted_at=read_time(row.deleted_at) if row.deleted_at else None,
        upkeep=Upkeep.read(row.upkeep),
    )


def _taken(name: str, account_id: str) -> Conflict:
    return Conflict(f"the account {account_id} has a hive {name} already", hint="choose another name")


def _missing(reference: str, account_id: str) -> NotFound:
    return NotFound(f"the account {account_id} has no hive {shown(reference)}", hint="list them with: skep hive list")
