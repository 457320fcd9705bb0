"""Appending is durable, ordered and shared; reading pages and follows without gap or duplicate."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypedDict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from skep.errors import ChainBroken, Conflict, InvalidRequest, SkepError, Unavailable
from skep.state.chain import Verdict, verify
from skep.state.checkpoint import Signer
from skep.state.database import Database
from skep.state.events import Event, Failed, HiveConfigured, Noted, Prompted, Recorded, Replied
from skep.state.log import MAX_APPEND, EventLog
from skep.state.schema import accounts, checkpoints, events

HIVE = "hv-a"


class Filed(TypedDict):
    """Under what an event is filed."""

    hive_id: str
    account_id: str
    actor: str


FILED: Filed = {"hive_id": HIVE, "account_id": "acme", "actor": "cli:me"}
PATIENCE_S = 30


@pytest.fixture
async def log(database: Database) -> AsyncIterator[EventLog]:
    opened = EventLog(database)
    yield opened
    await opened.close()


class Clock:
    """A clock that shows what it is told."""

    def __init__(self) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time

    def step(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


def note(number: int) -> Noted:
    return Noted(text=f"note {number}")


async def numbers(log: EventLog, hive_id: str = HIVE) -> list[int]:
    return [recorded.seq for recorded in await log.page(hive_id, limit=MAX_APPEND)]


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not reached():
            await asyncio.sleep(0.001)


async def test_an_event_comes_back_as_it_was_appended(log: EventLog) -> None:
    before = datetime.now(UTC)
    recorded = await log.append(Prompted(text="hello"), **FILED, task_id="t-1")
    assert recorded.at >= before
    assert (recorded.seq, recorded.event, recorded.task_id) == (1, Prompted(text="hello"), "t-1")
    assert await log.page(HIVE) == [recorded]


async def test_what_was_appended_is_there_after_the_database_is_opened_again(ready_url: str) -> None:
    first = await Database.open(ready_url)
    recorded = await EventLog(first).append(note(1), **FILED)
    await first.close()
    second = await Database.open(ready_url)
    assert await EventLog(second).page(HIVE) == [recorded]
    await second.close()


async def test_every_hive_has_a_sequence_of_its_own(log: EventLog) -> None:
    hives = ["hv-a", "hv-b", "hv-c"]
    calls = [log.append(note(n), hive_id=hives[n % 3], account_id="acme", actor="me") for n in range(60)]
    await asyncio.gather(*calls)
    for hive_id in hives:
        assert await numbers(log, hive_id) == list(range(1, 21))


async def test_events_appended_together_stand_together(log: EventLog) -> None:
    groups = [log.append_all([note(n)] * 5, **FILED) for n in range(20)]
    recorded = await asyncio.gather(*groups)
    for group in recorded:
        assert [one.seq for one in group] == list(range(group[0].seq, group[0].seq + 5))
    assert await numbers(log) == list(range(1, 101))


async def test_appending_nothing_records_nothing(log: EventLog) -> None:
    assert await log.append_all([], **FILED) == []
    assert await log.page(HIVE) == []


async def test_two_processes_may_append_to_the_same_hives(ready_url: str) -> None:
    """Two pools stand for two processes: all they share is the database."""
    databases = [await Database.open(ready_url) for _ in range(2)]
    logs = [EventLog(database) for database in databases]
    hives = ["hv-a", "hv-b", "hv-c"]

    async def append(log: EventLog, seed: int) -> None:
        chance = random.Random(seed)
        for number in range(20):
            hive_id = chance.choice(hives)
            await log.append(note(number), hive_id=hive_id, account_id="acme", actor=f"a-{seed}")

    await asyncio.gather(*(append(log, seed) for seed, log in enumerate(logs * 4)))
    verdict = await verify(databases[0])
    assert (verdict.ok, verdict.count) == (True, 160)
    for log, database in zip(logs, databases, strict=True):
        await log.close()
        await database.close()


async def test_time_never_runs_backwards_in_a_hive(database: Database) -> None:
    clock = Clock()
    log = EventLog(database, now=clock)
    times = []
    for step in (0, 5, -3600, 0, 4000):
        clock.step(step)
        times.append((await log.append(note(step), **FILED)).at)
    assert times == sorted(times)
    assert times[2] == times[1]
    assert times[-1] == clock.time
    clock.step(-7200)
    again = EventLog(database, now=clock)
    assert (await again.append(note(9), **FILED)).at == times[-1]
    await log.close()
    await again.close()


@pytest.mark.parametrize(
    "event",
    [
        Prompted(text="x" * 10_000_000),
        Prompted(text="\ud800"),
        HiveConfigured(changes={"n": 2**53}),
        HiveConfigured(changes={"n": float("nan")}),
    ],
    ids=["10 MB", "lone surrogate", "integer beyond 2**53", "NaN"],
)
async def test_bad_input_fails_its_own_caller_and_loses_nothing(log: EventLog, event: Prompted) -> None:
    good = [log.append(note(n), **FILED) for n in range(10)]
    outcomes = await asyncio.gather(*good[:5], log.append(event, **FILED), *good[5:], return_exceptions=True)
    refusals = [outcome for outcome in outcomes if not isinstance(outcome, Recorded)]
    assert [type(refusal) for refusal in refusals] == [InvalidRequest]
    assert await numbers(log) == list(range(1, 11))


async def test_one_bad_event_of_many_records_none_of_them(log: EventLog) -> None:
    with pytest.raises(InvalidRequest):
        await log.append_all([note(1), Prompted(text="\udc80"), note(2)], **FILED)
    assert await log.page(HIVE) == []


async def test_text_with_nul_and_from_right_to_left_is_kept_to_the_letter(log: EventLog) -> None:
    written = [Prompted(text="a\x00b"), Prompted(text="שלום \u202e مرحبا"), Prompted(text="\ufeff\u2028🐝")]
    await log.append_all(written, **FILED)
    assert [recorded.event for recorded in await log.page(HIVE)] == written


async def test_the_largest_events_fit_side_by_side(log: EventLog) -> None:
    large = Prompted(text="x" * 1_000_000)
    await asyncio.gather(*(log.append(large, **FILED) for _ in range(20)))
    assert [one.event for one in await log.page(HIVE, limit=20)] == [large] * 20


async def test_more_events_than_go_together_are_refused(log: EventLog) -> None:
    with pytest.raises(InvalidRequest, match="10,001 events"):
        await log.append_all([note(1)] * (MAX_APPEND + 1), **FILED)
    with pytest.raises(InvalidRequest, match="bytes in one call"):
        await log.append_all([Noted(text="x" * 1_000_000)] * 34, **FILED)
    assert await log.page(HIVE) == []


async def test_a_failed_batch_fails_its_own_callers_and_the_next_one_works(database: Database, log: EventLog) -> None:
    await log.append(note(0), **FILED)
    async with database.write() as connection:
        await connection.execute(text("ALTER TABLE skep_event_heads RENAME TO away"))
    calls = [log.append(note(n), **FILED) for n in range(5)]
    assert all(isinstance(lost, Exception) for lost in await asyncio.gather(*calls, return_exceptions=True))
    async with database.write() as connection:
        await connection.execute(text("ALTER TABLE away RENAME TO skep_event_heads"))
    assert (await log.append(note(9), **FILED)).seq == 2


async def test_a_log_that_reaches_beyond_its_stated_end_takes_no_more(database: Database, log: EventLog) -> None:
    await log.append_all([note(1), note(2)], **FILED)
    async with database.write() as connection:
        await connection.execute(text("UPDATE skep_event_heads SET seq = 1"))
    with pytest.raises(ChainBroken, match="beyond the end"):
        await log.append(note(3), **FILED)
    assert await numbers(log) == [1, 2]


@pytest.mark.parametrize("statement", ["DELETE FROM skep_event_heads", "UPDATE skep_event_heads SET seq = 9"])
async def test_a_lost_or_forged_end_is_noticed_when_appending(
    database: Database, log: EventLog, statement: str
) -> None:
    await log.append_all([note(1), note(2)], **FILED)
    async with database.write() as connection:
        await connection.execute(text(statement))
    for _ in range(2):
        with pytest.raises(ChainBroken):
            await log.append(note(3), **FILED)


async def test_a_cancelled_caller_takes_no_other_with_it(database: Database, log: EventLog) -> None:
    tasks = [asyncio.create_task(log.append(note(n), **FILED)) for n in range(40)]
    chance = random.Random(7)
    await asyncio.sleep(0)
    for task in chance.sample(tasks, 15):
        task.cancel()
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    await log.close()
    stored = {recorded.seq: recorded for recorded in await log.page(HIVE)}
    kept = [outcome for outcome in outcomes if isinstance(outcome, Recorded)]
    assert len(kept) >= 25
    assert all(stored[recorded.seq] == recorded for recorded in kept)
    texts = [recorded.event for recorded in stored.values()]
    assert len(texts) == len(set(map(str, texts))), "nothing is recorded twice"
    assert (await verify(database)).ok


async def test_closing_writes_what_is_queued_and_then_refuses(log: EventLog) -> None:
    tasks = [asyncio.create_task(log.append(note(n), **FILED)) for n in range(50)]
    await asyncio.sleep(0)
    await log.close()
    assert all(task.done() for task in tasks)
    assert await numbers(log) == list(range(1, 51))
    with pytest.raises(Unavailable, match="closed"):
        await log.append(note(1), **FILED)


async def signed(database: Database) -> list[int]:
    async with database.read() as connection:
        return [row.seq for row in await connection.execute(select(checkpoints).order_by(checkpoints.c.seq))]


async def test_checkpoints_are_signed_as_the_log_grows_and_at_its_close(database: Database, tmp_path: Path) -> None:
    signer = Signer.open(tmp_path / "events.pem")
    log = EventLog(database, signer=signer, checkpoint_every=10)
    for number in range(25):
        await log.append(note(number), **FILED)
    await log.close()
    assert await signed(database) == [10, 20, 25]
    assert signer.anchors.newest(HIVE) is not None
    assert await verify(database, signer=signer) == Verdict(count=25, hives=1, unanchored=0)


async def test_two_processes_that_close_sign_the_end_once(database: Database, tmp_path: Path) -> None:
    logs = [EventLog(database, signer=Signer.open(tmp_path / "events.pem")) for _ in range(2)]
    for number, log in enumerate(logs):
        await log.append(note(number), **FILED)
    for log in logs:
        await log.close()
    assert await signed(database) == [2]


async def test_a_forged_note_of_checkpoints_does_not_keep_the_log_unsigned(database: Database, tmp_path: Path) -> None:
    signer = Signer.open(tmp_path / "events.pem")
    log = EventLog(database, signer=signer)
    await log.append(note(1), **FILED)
    async with database.write() as connection:
        await connection.execute(text("UPDATE skep_event_heads SET checkpoint_seq = 1000000"))
    await log.append(note(2), **FILED)
    await log.close()
    assert await signed(database) == [2]


async def test_closing_a_log_that_did_not_grow_signs_nothing(database: Database, tmp_path: Path) -> None:
    signer = Signer.open(tmp_path / "events.pem")
    for _ in range(2):
        log = EventLog(database, signer=signer)
        await log.page(HIVE)
        await log.close()
    assert await signed(database) == []


async def test_appends_go_on_when_checkpoints_cannot_be_stored_and_closing_says_so(
    database: Database, tmp_path: Path
) -> None:
    signer = Signer.open(tmp_path / "keys" / "events.pem")
    signer.anchors.folder.write_text("a file in the way")
    log = EventLog(database, signer=signer, checkpoint_every=2)
    for number in range(6):
        await log.append(note(number), **FILED)
    with pytest.raises(Unavailable):
        await log.close()
    signer.anchors.folder.unlink()
    await log.close()
    assert await verify(database, signer=signer) == Verdict(count=6, hives=1, unanchored=0)


async def test_a_page_filters_by_type_task_and_time(database: Database) -> None:
    clock = Clock()
    log = EventLog(database, now=clock)
    kinds: list[Event] = [
        Prompted(text="a"),
        Replied(text="b"),
        Noted(text="c"),
        Failed(error="E", message="m"),
    ]
    for number in range(12):
        await log.append(kinds[number % 4], **FILED, task_id=f"t-{number % 3}")
        clock.step(60)
    every = await log.page(HIVE)

    async def found(**wanted: object) -> list[int]:
        return [recorded.seq for recorded in await log.page(HIVE, **wanted)]  # type: ignore[arg-type]

    assert await found(types=["prompted"]) == [1, 5, 9]
    assert await found(types=["prompted", "failed"], task_id="t-0") == [1, 4]
    assert await found(task_id="t-1", after=2) == [5, 8, 11]
    assert await found(since=every[3].at, until=every[6].at) == [4, 5, 6]
    assert await found(after=3, limit=2) == [4, 5]
    assert await found(after=12) == []
    await log.close()


@pytest.mark.parametrize(
    "wanted",
    [
        {"limit": 0},
        {"limit": 10_001},
        {"after": -1},
        {"after": 2**63},
        {"types": ["no-such"]},
        {"task_id": "../x"},
        {"since": datetime(2026, 1, 1)},
    ],
    ids=str,
)
async def test_a_page_that_makes_no_sense_is_refused(log: EventLog, wanted: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        await log.page(HIVE, **wanted)  # type: ignore[arg-type]


async def collect(log: EventLog, count: int, after: int = 0, types: tuple[str, ...] = ()) -> list[Recorded]:
    seen: list[Recorded] = []
    async with asyncio.timeout(PATIENCE_S), aclosing(log.follow(HIVE, after=after, types=types)) as followed:
        async for recorded in followed:
            seen.append(recorded)
            if len(seen) == count:
                return seen
    return seen


async def test_a_follower_sees_history_and_then_what_comes(log: EventLog) -> None:
    history = await log.append_all([note(n) for n in range(5)], **FILED)
    following = asyncio.create_task(collect(log, 8, after=2))
    live = [await log.append(note(n), **FILED) for n in range(5)]
    assert await following == [*history[2:], *live]


async def test_a_follower_may_ask_for_one_type(log: EventLog) -> None:
    following = asyncio.create_task(collect(log, 3, types=("replied",)))
    for number in range(3):
        await log.append_all([note(number), Replied(text=str(number))], **FILED)
    assert [recorded.seq for recorded in await following] == [2, 4, 6]


@pytest.mark.parametrize("size", [1, 10_000, 400_000], ids=["all at hand", "some at hand", "hardly any at hand"])
async def test_a_follower_sees_live_events_as_they_are_on_record(log: EventLog, size: int) -> None:
    following = asyncio.create_task(collect(log, 300))
    await until(lambda: HIVE in log._watch._waiting)
    text = Replied(text="ä" * (size // 2))
    for _ in range(3):
        await log.append_all([note(n) for n in range(98)], **FILED)
        await log.append_all([text, note(99)], **FILED)
    seen = await following
    assert [recorded.seq for recorded in seen] == list(range(1, 301))
    assert seen == await log.page(HIVE)
    assert not log._watch._tails


async def test_a_follower_sees_what_another_process_appends(ready_url: str) -> None:
    databases = [await Database.open(ready_url) for _ in range(2)]
    here, there = (EventLog(database) for database in databases)
    following = asyncio.create_task(collect(here, 3))
    await until(lambda: HIVE in here._watch._waiting)
    written = [await there.append(note(n), **FILED) for n in range(3)]
    assert await following == written
    for log, database in zip((here, there), databases, strict=True):
        await log.close()
        await database.close()


async def test_closing_the_log_ends_those_who_follow(log: EventLog) -> None:
    await log.append(note(1), **FILED)
    following = asyncio.create_task(collect(log, 100))
    await until(lambda: HIVE in log._watch._waiting)
    await log.close()
    assert len(await following) == 1


async def test_a_follower_hears_that_the_database_is_gone(postgres_url: str) -> None:
    import psycopg

    database = await Database.open(postgres_url)
    log = EventLog(database)
    following = asyncio.create_task(collect(log, 1))
    await until(lambda: HIVE in log._watch._waiting)
    name = postgres_url.split("/")[3].split("?", maxsplit=1)[0]
    server = postgres_url.replace(f"/{name}?", "/postgres?")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        with pytest.raises(SkepError):
            await following
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())
    assert (await log.append(note(1), **FILED)).seq == 1
    await log.close()
    await database.close()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(
    appenders=st.lists(st.integers(1, 12), min_size=2, max_size=6),
    starts=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 20)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_every_follower_sees_each_event_once_and_in_order(
    ready_sqlite: Path, appenders: list[int], starts: list[tuple[int, int]], seed: int
) -> None:
    """Whenever it begins to follow, from wherever, and whichever of two processes appends."""
    with tempfile.TemporaryDirectory() as folder:
        file = shutil.copy(ready_sqlite, folder)
        asyncio.run(follow_at_random(f"sqlite:///{file}", appenders, starts, seed))


async def test_every_follower_sees_each_event_once_on_both_databases(ready_url: str) -> None:
    starts = [(0, 0), (0, 5), (10, 0), (30, 17)]
    await follow_at_random(ready_url, appenders=[12, 9, 14, 11, 3, 8], starts=starts, seed=3)


async def follow_at_random(url: str, appenders: list[int], starts: list[tuple[int, int]], seed: int) -> None:
    databases = [await Database.open(url) for _ in range(2)]
    logs = [EventLog(database) for database in databases]
    chance = random.Random(seed)
    total = sum(appenders)

    async def append(log: EventLog, count: int) -> None:
        for number in range(count):
            await asyncio.sleep(chance.choice([0, 0, 0.002]))
            await log.append(note(number), **FILED)

    async def follow(log: EventLog, delay: int, after: int) -> list[int]:
        await asyncio.sleep(delay / 1000)
        return [one.seq for one in await collect(log, total - min(after, total - 1), min(after, total - 1))]

    async with asyncio.TaskGroup() as group:
        following = [group.create_task(follow(chance.choice(logs), *start)) for start in starts]
        for count in appenders:
            group.create_task(append(chance.choice(logs), count))
    for (_, after), task in zip(starts, following, strict=True):
        assert task.result() == list(range(min(after, total - 1) + 1, total + 1))
    for log, database in zip(logs, databases, strict=True):
        await log.close()
        await database.close()


async def test_the_columns_for_queries_repeat_the_record(database: Database, log: EventLog) -> None:
    recorded = await log.append(note(1), **FILED, task_id="t-1")
    async with database.read() as connection:
        row = (await connection.execute(select(events))).one()
    assert (row.hive_id, row.seq, row.account_id, row.task_id) == (HIVE, 1, "acme", "t-1")
    assert (row.type, row.actor, row.hash) == ("noted", "cli:me", recorded.hash)
    assert datetime.fromisoformat(row.at) == recorded.at


async def test_other_work_takes_effect_with_the_event(database: Database, log: EventLog) -> None:
    """What is done alongside an event is committed with it, and events queued around it keep their places."""

    async def mark(connection: AsyncConnection) -> None:
        await connection.execute(insert(accounts).values(id="alongside", created_at="2026-01-01T00:00:00.000000Z"))

    recorded = await asyncio.gather(
        log.append(note(1), **FILED), log.append(note(2), **FILED, alongside=mark), log.append(note(3), **FILED)
    )
    async with database.read() as connection:
        ids = (await connection.execute(select(accounts.c.id))).scalars().all()
    assert [each.seq for each in recorded] == [1, 2, 3]
    assert "alongside" in ids


async def test_an_event_is_not_recorded_when_the_work_alongside_fails(log: EventLog) -> None:
    """Work that fails takes its own event with it and no other."""

    async def fail(connection: AsyncConnection) -> None:
        raise Conflict("no")

    outcomes = await asyncio.gather(
        log.append(note(1), **FILED),
        log.append(note(2), **FILED, alongside=fail),
        log.append(note(3), **FILED),
        return_exceptions=True,
    )
    assert isinstance(outcomes[1], Conflict)
    assert [each.event for each in await log.page(HIVE)] == [note(1), note(3)]
    assert await numbers(log) == [1, 2]
