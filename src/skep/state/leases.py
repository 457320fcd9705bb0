"""Leases: who may act on a thing for now, and a token that stops whoever may not any more."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Double, cast, delete, func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import InvalidRequest, LeaseLost
from skep.state.database import Database
from skep.state.location import Dialect
from skep.state.record import check_id
from skep.state.schema import leases

# The day that Unix time counts from, as SQLite counts days.
_EPOCH_DAY = 2440587.5


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to act on `name` until `expires_at`, in seconds of the database's clock.

    `token` is larger than that of every lease on this name before it.
    """

    name: str
    holder: str
    token: int
    expires_at: float


class Leases:
    """The leases kept in a database, judged by its clock alone.

    A clock that steps, or a holder that sleeps, can make two holders believe in the same lease. What keeps
    them apart is `guard`: of two tokens only the larger one passes. Rows stay, so no token returns; but see `retire`.
    """

    def __init__(self, database: Database, *, now: Callable[[], ColumnElement[float]] | None = None) -> None:
        self._database = database
        self._now = now or (lambda: clock(database.dialect))

    async def acquire(self, name: str, *, holder: str, ttl_s: float) -> Lease | None:
        """Take the lease if it is free, released or expired; None while anybody, even `holder`, has it."""
        now, ttl = self._now(), _check_ttl(ttl_s)
        statement = (
            self._database.insert(leases)
            .values(name=check_id("name", name), holder=check_id("holder", holder), token=1, expires_at=now + ttl)
            .on_conflict_do_update(
                index_elements=[leases.c.name],
                set_={"holder": holder, "token": leases.c.token + 1, "expires_at": now + ttl},
                where=or_(leases.c.holder.is_(None), leases.c.expires_at <= now),
            )
            .returning(leases.c.token, leases.c.expires_at)
        )
        async with self._database.write() as connection:
            row = (await connection.execute(statement)).one_or_none()
        return None if row is None else Lease(name, holder, row.token, row.expires_at)

    async def renew(self, lease: Lease, ttl_s: float) -> Lease:
        """Let the lease run for `ttl_s` from now, even an expired one nobody took, or raise LeaseLost."""
        statement = (
            update(leases)
            .where(*_is(lease))
            .values(expires_at=self._now() + _check_ttl(ttl_s))
            .returning(leases.c.expires_at)
        )
        async with self._database.write() as connection:
            expires_at = (await connection.execute(statement)).scalar_one_or_none()
        if expires_at is None:
            raise _lost(lease)
        return Lease(lease.name, lease.holder, lease.token, expires_at)

    async def release(self, lease: Lease) -> None:
        """Give the lease back, so that others need not wait for it to expire; harmless if it is lost."""
        async with self._database.write() as connection:
            await connection.execute(update(leases).where(*_is(lease)).values(holder=None))

    async def retire(self, lease: Lease) -> None:
        """Give back a lease on a name that nobody will use again, and forget the name; harmless if it is lost."""
        async with self._database.write() as connection:
            await connection.execute(delete(leases).where(*_is(lease)))

    async def guard(self, connection: AsyncConnection, lease: Lease) -> None:
        """Raise LeaseLost unless nobody has taken the lease since; until the transaction ends nobody can.

        Call it in the transaction whose writes it protects, before them.
        """
        statement = select(leases.c.token).where(*_is(lease)).with_for_update(read=True)
        if (await connection.execute(statement)).scalar_one_or_none() is None:
            raise _lost(lease)


def clock(dialect: Dialect) -> ColumnElement[float]:
    """Give the database's own time in seconds since 1970, as it is when the statement runs."""
    if dialect == "postgresql":
        # now() would be the time at which the transaction began.
        return cast(func.extract("epoch", func.clock_timestamp()), Double)
    return (func.julianday("now", type_=Double) - _EPOCH_DAY) * 86400.0


def _is(lease: Lease) -> tuple[ColumnElement[bool], ...]:
    return (
        leases.c.name == literal(lease.name),
        leases.c.token == lease.token,
        leases.c.holder == lease.holder,
    )


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"{lease.holder} no longer has the lease on {lease.name}",
        hint="stop acting on it; acquire it again and begin from what is stored",
    )


def _check_ttl(ttl_s: float) -> float:
    if not (math.isfinite(ttl_s) and ttl_s > 0):
        raise InvalidRequest(f"a lease cannot last {ttl_s} s", hint="ttl_s is a number of seconds above zero")
    return ttl_s
