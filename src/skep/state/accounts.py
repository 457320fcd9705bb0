"""Accounts: the tenants that own hives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Row, exists, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import Conflict, NotFound
from skep.state.database import Database
from skep.state.names import check_name, shown
from skep.state.record import read_time, write_time
from skep.state.schema import accounts, hives


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Account:
    id: str
    created_at: datetime


class Accounts:
    """The accounts of a database. An id is never given twice, since events of its first owner may remain."""

    def __init__(self, database: Database, *, now: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self._now = now

    async def create(self, account_id: str) -> Account:
        """Make an account; raise Conflict if there is, or was, one by this id."""
        account = await self._insert(check_name("account id", account_id))
        if account is None:
            raise Conflict(f"the account {account_id} exists, or existed once", hint="choose another id")
        return account

    async def ensure(self, account_id: str) -> Account:
        """Return the account, made now if there never was one by this id."""
        return await self._insert(check_name("account id", account_id)) or await self.show(account_id)

    async def _insert(self, account_id: str) -> Account | None:
        at = self._now()
        statement = self._database.insert(accounts).values(id=account_id, created_at=write_time(at))
        async with self._database.write() as connection:
            made = await connection.execute(statement.on_conflict_do_nothing().returning(accounts.c.id))
            return Account(account_id, at) if made.one_or_none() else None

    async def list(self) -> tuple[Account, ...]:
        """Return every account, by id."""
        statement = select(accounts).where(accounts.c.deleted_at.is_(None)).order_by(accounts.c.id)
        async with self._database.read() as connection:
            return tuple(_account(row) for row in (await connection.execute(statement)).all())

    async def show(self, account_id: str) -> Account:
        async with self._database.read() as connection:
            return await require_account(connection, account_id)

    async def delete(self, account_id: str) -> None:
        """Delete an account that has no hives left; raise Conflict if it has some."""
        check_name("account id", account_id)
        async with self._database.write() as connection:
            await require_account(connection, account_id)
            # The update comes first: it waits for whoever is adding a hive, and stops who comes later.
            await connection.execute(
                update(accounts).where(accounts.c.id == account_id).values(deleted_at=write_time(self._now()))
            )
            alive = exists().where(hives.c.account_id == account_id, hives.c.deleted_at.is_(None))
            if (await connection.execute(select(alive))).scalar_one():
                raise Conflict(f"the account {account_id} still has hives", hint="delete its hives first")


async def require_account(connection: AsyncConnection, account_id: str, *, lock: bool = False) -> Account:
    """Read an account or raise NotFound; with `lock` it cannot be deleted before the transaction ends."""
    check_name("account id", account_id)
    statement = select(accounts).where(accounts.c.id == account_id, accounts.c.deleted_at.is_(None))
    if lock:
        statement = statement.with_for_update(read=True)
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise NotFound(f"there is no account {shown(account_id)}", hint="list them with: skep account list")
    return _account(row)


def _account(row: Row[tuple[Any, ...]]) -> Account:
    return Account(row.id, read_time(row.created_at))
