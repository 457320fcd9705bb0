from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy import Double, literal, select, text

from skep.errors import InvalidRequest, LeaseLost
from skep.state.database import Database
from skep.state.leases import Lease, Leases, clock
from skep.state.schema import leases as lease_rows

DEADLINE_S = 30
UntilWaiting = Callable[[asyncio.Task[Any]], Awaitable[None]]


async def test_only_one_holder_gets_a_free_lease(database: Database) -> None:
    leases = Leases(database)
    taken = await asyncio.gather(*(leases.acquire("thing", holder=f"h{n}", ttl_s=60) for n in range(8)))
    assert [lease.token for lease in taken if lease] == [1]


async def test_a_holder_does_not_get_its_own_lease_twice(database: Database) -> None:
    leases = Leases(database)
    assert await leases.acquire("thing", holder="me", ttl_s=60)
    assert await leases.acquire("thing", holder="me", ttl_s=60) is None


async def test_a_retired_lease_leaves_no_row_and_its_token_is_dead(database: Database) -> None:
    leases = Leases(database)
    lease = await leases.acquire("one", holder="me", ttl_s=60)
    assert lease is not None
    await leases.retire(lease)
    await leases.retire(lease)
    with pytest.raises(LeaseLost):
        await leases.renew(lease, 60)
    async with database.read() as connection:
        assert (await connection.execute(select(lease_rows))).all() == []


async def test_a_released_lease_is_free_at_once_and_its_token_is_dead(database: Database) -> None:
    leases = Leases(database)
    first = await leases.acquire("thing", holder="a", ttl_s=60)
    assert first
    await leases.release(first)
    with pytest.raises(LeaseLost):
        await leases.renew(first, 60)
    second = await leases.acquire("thing", holder="a", ttl_s=60)
    assert second and second.token > first.token
    await leases.release(first)
    assert await leases.renew(second, 60)


async def test_the_databases_clock_agrees_with_this_machines(database: Database) -> None:
    before = time.time()
    async with database.read() as connection:
        there = (await connection.execute(select(clock(database.dialect)))).scalar_one()
    # SQLite's clock has milliseconds, rounded.
    assert before - 0.002 <= there <= time.time() + 0.002


async def test_the_databases_clock_runs_on_within_a_transaction(database: Database) -> None:
    deadline = time.monotonic() + DEADLINE_S
    async with database.write() as connection:
        first = last = (await connection.execute(select(clock(database.dialect)))).scalar_one()
        while last == first and time.monotonic() < deadline:
            last = (await connection.execute(select(clock(database.dialect)))).scalar_one()
    assert last > first


async def test_renewing_counts_from_now_by_the_databases_clock(database: Database) -> None:
    now = 1000.0
    leases = Leases(database, now=lambda: literal(now, Double))
    lease = await leases.acquire("thing", holder="a", ttl_s=10)
    assert lease and lease.expires_at == 1010
    now = 1005.0
    assert (await leases.renew(lease, 10)).expires_at == 1015


async def test_a_guarded_write_of_a_lost_lease_changes_nothing(database: Database) -> None:
    now = 0.0
    leases = Leases(database, now=lambda: literal(now, Double))
    old = await leases.acquire("thing", holder="a", ttl_s=10)
    now = 10.0
    new = await leases.acquire("thing", holder="b", ttl_s=10)
    assert old and new and new.token > old.token
    with pytest.raises(LeaseLost, match="a no longer has the lease on thing"):
        async with database.write() as connection:
            await _mark(connection, "a")
            await leases.guard(connection, old)
    async with database.write() as connection:
        await leases.guard(connection, new)
        await _mark(connection, "b")
    async with database.read() as connection:
        assert (await connection.execute(text("SELECT id FROM skep_accounts"))).scalars().all() == ["b"]


async def test_nobody_takes_a_lease_over_while_a_guarded_write_is_under_way(
    database: Database, until_waiting: UntilWaiting
) -> None:
    now = 0.0
    leases = Leases(database, now=lambda: literal(now, Double))
    old = await leases.acquire("thing", holder="a", ttl_s=10)
    assert old
    now = 10.0
    async with database.write() as connection:
        await leases.guard(connection, old)
        takeover = asyncio.create_task(leases.acquire("thing", holder="b", ttl_s=10))
        await until_waiting(takeover)
        assert not takeover.done()
        await _mark(connection, "a")
    assert await takeover
    with pytest.raises(LeaseLost):
        async with database.write() as connection:
            await leases.guard(connection, old)


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf")])
async def test_a_lease_lasts_a_finite_time_above_zero(database: Database, ttl_s: float) -> None:
    with pytest.raises(InvalidRequest, match="cannot last"):
        await Leases(database).acquire("thing", holder="a", ttl_s=ttl_s)


@pytest.mark.parametrize("name", ["", "../x", "a\0b", "a" * 10_000, "\u202eevil", "a b", "a\n"])
async def test_odd_names_are_refused_and_shown_safely(database: Database, name: str) -> None:
    for request in ({"name": name, "holder": "a"}, {"name": "a", "holder": name}):
        with pytest.raises(InvalidRequest) as caught:
            await Leases(database).acquire(ttl_s=1, **request)
        assert caught.value.message.isascii() and caught.value.message.isprintable()
        assert len(caught.value.message) < 200


async def _mark(connection: Any, account: str) -> None:
    await connection.execute(text("INSERT INTO skep_accounts (id, created_at) VALUES (:id, '')"), {"id": account})


class Holders(RuleBasedStateMachine):
    """Many holders, each with a memory of its own, under a clock that also steps back.

    The rules are the promises: whoever holds the newest token may write, nobody else may, and a lease that
    was taken is taken only after its time by the clock, or after its release.
    """

    url: str
    names = ("one", "two")
    who = st.integers(0, 4)
    which = st.sampled_from(names)

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.database = self._run(Database.open(self.url))
        self._run(_clear(self.database))
        self.now = 1000.0
        self.leases = Leases(self.database, now=lambda: literal(self.now, Double))
        self.believed: dict[tuple[int, str], Lease] = {}
        self.newest: dict[str, Lease] = {}
        self.free = set(self.names)

    def _run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @rule(by=st.sampled_from([-50.0, -1.0, 0.5, 1.0, 9.0, 10.0, 100.0]))
    def the_clock_moves(self, by: float) -> None:
        self.now += by

    @rule(who=who, name=which, ttl_s=st.sampled_from([1.0, 10.0]))
    def acquire(self, who: int, name: str, ttl_s: float) -> None:
        lease = self._run(self.leases.acquire(name, holder=f"holder-{who}", ttl_s=ttl_s))
        before = self.newest.get(name)
        open_ = name in self.free or before is None or before.expires_at <= self.now
        assert (lease is not None) == open_
        if lease is not None:
            assert lease.token == (before.token + 1 if before else 1)
            assert lease.expires_at == self.now + ttl_s
            self.believed[who, name] = self.newest[name] = lease
            self.free.discard(name)

    @rule(who=who, name=which, ttl_s=st.sampled_from([1.0, 10.0]))
    def renew(self, who: int, name: str, ttl_s: float) -> None:
        lease = self.believed.get((who, name))
        if lease is None:
            return
        if not self._valid(lease):
            with pytest.raises(LeaseLost):
                self._run(self.leases.renew(lease, ttl_s))
            return
        renewed = self._run(self.leases.renew(lease, ttl_s))
        assert renewed.token == lease.token and renewed.expires_at == self.now + ttl_s
        self.believed[who, name] = self.newest[name] = renewed

    @rule(who=who, name=which)
    def release(self, who: int, name: str) -> None:
        lease = self.believed.get((who, name))
        if lease is None:
            return
        if self._valid(lease):
            self.free.add(name)
        self._run(self.leases.release(lease))

    @rule(who=who, name=which)
    def write_guarded(self, who: int, name: str) -> None:
        lease = self.believed.get((who, name))
        if lease is None:
            return
        if self._valid(lease):
            self._run(self._guarded(lease))
        else:
            with pytest.raises(LeaseLost):
                self._run(self._guarded(lease))

    async def _guarded(self, lease: Lease) -> None:
        async with self.database.write() as connection:
            await self.leases.guard(connection, lease)

    def _valid(self, lease: Lease) -> bool:
        return lease.name not in self.free and lease.token == self.newest[lease.name].token

    @invariant()
    def the_rows_hold_the_newest_tokens(self) -> None:
        assert self._run(_tokens(self.database)) == {name: lease.token for name, lease in self.newest.items()}

    def teardown(self) -> None:
        self._run(self.database.close())
        self.loop.close()


async def _tokens(database: Database) -> dict[str, int]:
    async with database.read() as connection:
        rows = await connection.execute(select(lease_rows.c.name, lease_rows.c.token))
        return {row.name: row.token for row in rows}


async def _clear(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(text("DELETE FROM skep_leases"))


def test_tokens_keep_holders_apart_whatever_the_clock_does(ready_url: str) -> None:
    machine = type("Holders", (Holders,), {"url": ready_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


HOLDER = textwrap.dedent("""
    import asyncio, sys
    from sqlalchemy import text
    from skep.errors import LeaseLost
    from skep.state.database import Database
    from skep.state.leases import Leases

    async def main(url, holder, ttl_s):
        database = await Database.open(url)
        leases = Leases(database)
        while (lease := await leases.acquire("thing", holder=holder, ttl_s=ttl_s)) is None:
            await asyncio.sleep(0.02)
        print("acquired", lease.token, flush=True)
        for line in sys.stdin:
            try:
                async with database.write() as connection:
                    await leases.guard(connection, lease)
                    statement = text("INSERT INTO skep_accounts (id, created_at) VALUES (:id, '')")
                    await connection.execute(statement, {"id": line.strip()})
                print("written", flush=True)
            except LeaseLost as error:
                print("refused", error, flush=True)
        await database.close()

    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
""")


class Holder:
    """A process of its own that takes the lease and writes what it is told, guarded."""

    def __init__(self, url: str, name: str, *, ttl_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, url, name, str(ttl_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def hears(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def write(self, account: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{account}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def test_a_holder_that_was_stopped_and_replaced_cannot_write_when_it_wakes(ready_url: str) -> None:
    holders: list[Holder] = []
    try:
        first = Holder(ready_url, "first", ttl_s=1)
        holders.append(first)
        assert first.hears() == "acquired 1"
        first.write("before")
        assert first.hears() == "written"
        os.kill(first.process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + DEADLINE_S
        while not _stopped(first.process.pid):
            assert time.monotonic() < deadline
        first.write("late")
        second = Holder(ready_url, "second", ttl_s=60)
        holders.append(second)
        assert second.hears() == "acquired 2"
        os.kill(first.process.pid, signal.SIGCONT)
        assert first.hears().startswith("refused")
        second.write("after")
        assert second.hears() == "written"
    finally:
        for holder in holders:
            holder.end()
    database = await Database.open(ready_url)
    async with database.read() as connection:
        written = (await connection.execute(text("SELECT id FROM skep_accounts"))).scalars().all()
    await database.close()
    assert sorted(written) == ["after", "before"]
