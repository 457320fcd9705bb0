"""How fast events are appended and verified."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from bench import floors, postgres
from bench.report import Section
from skep.state.chain import verify
from skep.state.checkpoint import Signer
from skep.state.database import Database
from skep.state.events import Prompted
from skep.state.log import EventLog

APPENDERS = 32
APPENDS = 16_000
ALONE = 1_000
VERIFIED = 200_000
ROUNDS = 3

EVENT = Prompted(text="Please read the report in attachments/report.pdf and tell me which figures changed. " * 2)


class Filed(TypedDict):
    """Under what an event is filed."""

    hive_id: str
    account_id: str
    actor: str
    task_id: str


FILED: Filed = {"hive_id": "hv-a", "account_id": "acme", "actor": "cli:me", "task_id": "task-1"}

METHOD = f"""\
{APPENDERS} tasks append to one hive, each waiting until its event is durable before it appends the next:
{APPENDS:,} events of about 400 bytes on a fresh database, with signed checkpoints, `synchronous=FULL` on SQLite and
PostgreSQL's durable defaults on a local server. The floors are hand-written on Python's `sqlite3` with one plain
table, no second index, no hashing, no types: a group commit of {APPENDERS} threads, and one commit per event.
`verify` walks {VERIFIED:,} events of one hive with its checkpoints. Floors and Skep take turns, {ROUNDS} rounds; the
table shows the median, the lowest and the highest. Promised: 5,000 appends/s on SQLite, 100,000 verified/s.
"""

Rates = dict[str, list[float]]


@contextmanager
def folder() -> Iterator[Path]:
    # Not the system's temporary folder, which is often memory: there a sync costs nothing.
    place = Path(tempfile.mkdtemp(prefix="skep-bench-", dir="/var/tmp"))
    try:
        yield place
    finally:
        shutil.rmtree(place)


async def append(url: str, key: Path, *, appenders: int, count: int) -> float:
    database = await Database.open(url)
    log = EventLog(database, signer=Signer.open(key))

    async def one() -> None:
        for _ in range(count // appenders):
            await log.append(EVENT, **FILED)

    before = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(appenders)))
    took = time.perf_counter() - before
    await log.close()
    await database.close()
    return count / took


async def fill(url: str, key: Path) -> None:
    database = await Database.open(url)
    log = EventLog(database, signer=Signer.open(key))
    for _ in range(VERIFIED // 5_000):
        await log.append_all([EVENT] * 5_000, **FILED)
    await log.close()
    await database.close()


async def verified(url: str, key: Path) -> float:
    database = await Database.open(url)
    before = time.perf_counter()
    verdict = await verify(database, signer=Signer.open(key))
    took = time.perf_counter() - before
    await database.close()
    assert verdict.ok
    return verdict.count / took


def on_sqlite(rates: Rates) -> None:
    record = "x" * 400
    with folder() as place:
        for number in range(ROUNDS):
            url, key = f"sqlite:///{place / f'skep{number}.db'}", place / f"keys{number}" / "events.pem"
            alone = f"sqlite:///{place / f'alone{number}.db'}", place / f"alone{number}" / "events.pem"
            for name, rate in (
                ("floor: one commit per event", floors.one_sync_per_event(place / f"a{number}", record, ALONE)),
                (
                    f"floor: group commit, {APPENDERS} threads",
                    floors.group_commit(place / f"b{number}", record, APPENDS, threads=APPENDERS),
                ),
                (
                    f"append, {APPENDERS} at once, SQLite",
                    asyncio.run(append(url, key, appenders=APPENDERS, count=APPENDS)),
                ),
                ("append, one alone, SQLite", asyncio.run(append(*alone, appenders=1, count=ALONE))),
            ):
                rates.setdefault(name, []).append(rate)
        url, key = f"sqlite:///{place / 'verify.db'}", place / "verify" / "events.pem"
        asyncio.run(fill(url, key))
        rates["verify, SQLite"] = [asyncio.run(verified(url, key)) for _ in range(ROUNDS)]


def on_postgresql(rates: Rates) -> None:
    with folder() as place:
        for number in range(ROUNDS):
            with postgres.running() as url:
                key = place / f"keys{number}" / "events.pem"
                rate = asyncio.run(append(url, key, appenders=APPENDERS, count=APPENDS))
                rates.setdefault(f"append, {APPENDERS} at once, PostgreSQL", []).append(rate)
        with postgres.running() as url:
            asyncio.run(fill(url, place / "verify" / "events.pem"))
            key = place / "verify" / "events.pem"
            rates["verify, PostgreSQL"] = [asyncio.run(verified(url, key)) for _ in range(ROUNDS)]


def measure() -> Section:
    rates: Rates = {}
    on_sqlite(rates)
    on_postgresql(rates)
    return Section(
        name="events",
        title="Event log",
        method=METHOD,
        columns=["what", "events/s", "lowest", "highest"],
        rows=[[name, *map(_shown, (statistics.median(of), min(of), max(of)))] for name, of in rates.items()],
        notes=_notes(rates),
    )


def _notes(rates: Rates) -> str:
    names = iter(rates)
    each, group, ours = (statistics.median(rates[next(names)]) for _ in range(3))
    return (
        f"With {APPENDERS} appenders Skep reaches {ours / group:.0%} of the hand-written group commit and"
        f" {ours / each:.1f} times what one commit per event allows."
    )


def _shown(rate: float) -> str:
    return f"{rate:,.0f}"
