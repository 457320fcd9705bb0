"""What it costs to find the computer of a conversation again: running, stopped, and two hundred at once."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import text

from bench.contest import GAP_S, Contender, compete
from bench.report import Section
from skep.app.apiary import Apiary
from skep.app.program import Program, open_program
from skep.app.reception import open_sessions
from skep.config import Paths, Settings
from skep.sandbox.sandbox import Sandbox
from skep.sessions import putting_away
from skep.sessions.computer import Computer
from skep.sessions.sessions import Sessions
from skep.state.hives import Hive

ACCOUNT = "bench"
CALLS, ROUNDS, MANY = 500, 40, 200

METHOD = f"""\
One process with a SQLite file, as `skep` has them, and workspaces of the template `minimal`. "live" is `resolve` of a
session whose computer runs in this process, {CALLS} times; the round trip is an empty statement in a transaction of
its own, and the read is the one that `resolve` makes, which says whose the session is and how it stands. "resume" is
`resolve` of a session that was stopped, until its computer has answered; the raw start is `Sandbox.create` alone, with
the same layers, mounts and limits, without a record, a lock or a health check. Both take turns, {ROUNDS} rounds. The
{MANY} sessions are threads of one hive with a workspace each, all asked for in the same moment.
"""


def measure() -> Section:
    with tempfile.TemporaryDirectory(prefix="skep-bench-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        return asyncio.run(_measure(Path(folder)))


async def _measure(folder: Path) -> Section:
    home = folder / "home"
    home.mkdir()
    paths = Paths(config=home / "config.json", home=home, logs=home / "log")
    settings = Settings.model_validate({"workspace": {"template": "minimal"}})
    async with open_program(paths, settings) as program:
        await program.accounts.create(ACCOUNT)
        hive = await program.hives.create("bench", account_id=ACCOUNT, actor="bench")
        hive = await program.hives.configure(hive.id, {"threads": "thread"}, account_id=ACCOUNT, actor="bench")
        apiary = Apiary(paths, settings)
        await apiary.snapshots.build("minimal", on_progress=lambda _: None)
        async with open_sessions(program) as sessions:
            bench = Bench(program, apiary, sessions, hive)
            rows = []
            for part in (bench.live, bench.resume, bench.many):
                print(f"measuring {part.__name__} …", flush=True)
                rows += await part()
    return Section("sessions", "Sessions", METHOD, ("what", "figure", "against", "goal"), rows)


@dataclass(slots=True)
class Bench:
    """One hive, and what is measured of its sessions."""

    program: Program
    apiary: Apiary
    sessions: Sessions
    hive: Hive

    async def resolve(self, thread: str) -> Computer:
        return await self.sessions.resolve(self.hive, thread, account_id=ACCOUNT)

    async def live(self) -> list[list[str]]:
        await self.resolve("cli:live")
        session = self.sessions.wanted(self.hive, "cli:live")

        async def round_trip() -> None:
            async with self.program.database.read() as connection:
                await connection.execute(text("SELECT 1"))

        acts = {
            "resolve": lambda: self.resolve("cli:live"),
            "read": lambda: self.sessions.ledger.standing(session),
            "trip": round_trip,
        }
        took: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(CALLS):
            for name, act in acts.items():
                took[name].append(await _timed(act()))
        resolve, read, trip = (took[name][10:] for name in acts)
        against = (
            f"of which the read {_ms(statistics.median(read))}; an empty round trip {_ms(statistics.median(trip))}"
        )
        figure = f"{_ms(statistics.median(resolve))}, p95 {_ms(_p95(resolve))}"
        return [["resolve of a live session", figure, against, "p50 <= 3 ms, p95 <= 10 ms"]]

    async def resume(self) -> list[list[str]]:
        resumed, raw = "cli:resumed", "cli:raw"
        for thread in (resumed, raw):
            await self.resolve(thread)
            await self._stop(thread)

        async def resume() -> float:
            took = await _timed(self.resolve(resumed))
            await self._stop(resumed)
            return took

        workspace_id = self.sessions.wanted(self.hive, raw).id
        async with self.apiary.at(workspace_id).hold(workspace_id) as workspace:
            grounds, manifest = workspace.grounds, workspace.manifest

            async def start() -> float:
                began = time.perf_counter()
                sandbox = await Sandbox.create(
                    stack=grounds.stack(manifest),
                    limits=grounds.limits_for(manifest),
                    mounts=[shown.mount() for shown in manifest.shown],
                )
                took = time.perf_counter() - began
                await sandbox.stop()
                return took

            ours, floor = Contender("resume", resume, ROUNDS), Contender("raw", start, ROUNDS)
            await compete([ours, floor], gap_s=GAP_S)
        most = 2 * floor.median + 0.01
        figure = f"{_ms(ours.median)}, p95 {_ms(ours.p95)}"
        against = f"raw start {_ms(floor.median)}, so at most {_ms(most)} ({ours.median / floor.median:.2f} x)"
        return [["resume of a stopped session", figure, against, "<= 2.0 x + 10 ms"]]

    async def _stop(self, thread: str) -> None:
        await putting_away.stop(self.sessions, self.sessions.wanted(self.hive, thread).id)

    async def many(self) -> list[list[str]]:
        threads = [f"cli:many-{number}" for number in range(MANY)]
        rows = []
        for what in ("new", "live", "stopped"):
            if what == "stopped":
                for thread in threads:
                    await self._stop(thread)
            free = _available()
            began = time.perf_counter()
            outcomes = await asyncio.gather(*map(self.resolve, threads), return_exceptions=True)
            took = time.perf_counter() - began
            failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            used = "" if what == "live" else f"{(free - _available()) / MANY / 1e6:.1f} MB of memory each"
            if failed:
                used += f"; the first that failed: {failed[0]!r}"
            rows.append([f"{MANY} {what} sessions at once", f"{took:.2f} s, {len(failed)} failed", used, "none fails"])
        return rows


async def _timed(work: Awaitable[object]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


def _available() -> int:
    """Return how many bytes of memory the machine has to give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _p95(figures: list[float]) -> float:
    return statistics.quantiles(figures, n=20, method="inclusive")[-1]
