"""How fast a sandbox starts and works, beside its floors and its rivals."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench import rivals
from bench.contest import GAP_S, Contender, compete
from bench.report import Section
from skep.sandbox.bubblewrap import BubblewrapSandbox
from skep.sandbox.launcher import spare
from skep.sandbox.sandbox import Sandbox

CREATIONS, EXECUTIONS, SLOW_ROUNDS, RATES = 60, 400, 12, 7
AT_ONCE, COMMANDS = 8, 400
MANY = 100
MB = 1_000_000
FILE_BYTES, STREAM_BYTES = 10 * MB, 100 * MB
TRUE = ["/bin/true"]
#: A few milliseconds of work, as most commands have at least.
WORK = ["/bin/sh", "-c", "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done"]

METHOD = f"""\
Everything is measured in one run, the contenders taking turns, with {GAP_S * 1000:.0f} ms before each new namespace
(the kernel takes old ones down in the background). Times are the median and the 95th percentile of {CREATIONS}
creations and {EXECUTIONS} executions, {SLOW_ROUNDS} for engines; rates are the median and the lowest of {RATES} rounds.
The floor of a creation is bwrap by itself with the very arguments of a Skep sandbox, without launcher, control groups,
user of its own and agent; that of a command is `posix_spawn` and `waitpid`. "outside" is the same command through
asyncio's subprocess with its output piped, {AT_ONCE} at once. Skep's figures are those of `Sandbox.create`, `run`,
`files` and `start` with all limits and protections on, output captured.
"""

Row = list[str]


@dataclass(slots=True)
class Rivals:
    """The rivals that can be measured here, and why the others cannot."""

    creators: dict[str, Callable[[], float]] = field(default_factory=dict)
    executors: dict[str, Callable[[], float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, rival: rivals.Docker | rivals.Gvisor | rivals.Sandlock) -> None:
        try:
            rival.create()
            rival.exec()
        except rivals.NotHere as reason:
            self.absent[name] = str(reason)
        else:
            self.creators[name], self.executors[name] = rival.create, rival.exec


Opener = Callable[[Path], AbstractContextManager[rivals.Docker | rivals.Gvisor | rivals.Sandlock]]
OPENERS: dict[str, Opener] = {"docker": rivals.docker, "runsc": rivals.gvisor, "sandlock": rivals.sandlock}


@contextmanager
def _rivals() -> Iterator[Rivals]:
    found = Rivals()
    with ExitStack() as at_end:
        for name, opener in OPENERS.items():
            place = Path(at_end.enter_context(_folder(f"skep-bench-{name}-")))
            try:
                found.add(name, at_end.enter_context(opener(place)))
            except rivals.NotHere as reason:
                found.absent[name] = str(reason)
        yield found


@contextmanager
def _folder(prefix: str) -> Iterator[str]:
    place = tempfile.mkdtemp(prefix=prefix, dir="/var/tmp")
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def measure() -> Section:
    with _rivals() as found:
        rows = asyncio.run(_measure(found))
    absent = "; ".join(f"{name}: {reason}" for name, reason in found.absent.items())
    return Section(
        name="sandbox",
        title="Sandbox",
        method=METHOD,
        columns=["what", "by", "p50", "p95 or least", "against the floor", "goal"],
        rows=rows,
        notes=f"Not available here: {absent}." if absent else "",
    )


async def _measure(found: Rivals) -> list[Row]:
    rows = [*await _creation(found), *await _execution(found)]
    for name, command in (("`true`", TRUE), ("a few ms of work", WORK)):
        rows += await _throughput(name, command)
    return [*rows, *await _files(), *await _stream(), *await _many()]


def _later(act: Callable[[], float]) -> Callable[[], Awaitable[float]]:
    async def done() -> float:
        return act()

    return done


# ---- times ------------------------------------------------------------------------------------------------------


async def _creation(found: Rivals) -> list[Row]:
    floor = Contender("bwrap by itself (floor)", _later(rivals.raw_bwrap), CREATIONS)
    skep = Contender("Skep", _create, CREATIONS)
    others = [Contender(name, _later(create), SLOW_ROUNDS) for name, create in found.creators.items()]
    await compete([floor, skep, *others], gap_s=GAP_S)
    ratio, spread = skep.median / floor.median, skep.p95 / skep.median
    goal = _goal(
        (ratio <= 1.5, f"{ratio:.2f} of at most 1.5 x the floor"),
        (skep.median <= 0.020, f"{skep.median * 1000:.1f} of at most 20 ms"),
        (spread <= 2, f"p95 {spread:.1f} of at most 2 x p50"),
    )
    return _times("create to first command done", [floor, skep, *others], goal)


async def _create() -> float:
    began = time.perf_counter()
    sandbox = await Sandbox.create()
    assert (await sandbox.run(TRUE)).ok
    took = time.perf_counter() - began
    await sandbox.stop()
    return took


async def _execution(found: Rivals) -> list[Row]:
    async with Sandbox.create() as sandbox:
        spawn = Contender("`posix_spawn`, `waitpid` (floor)", _later(lambda: rivals.timed(TRUE)), EXECUTIONS)
        skep = Contender("Skep", lambda: _timed(_run_inside(sandbox, TRUE)), EXECUTIONS)
        local = Contender("asyncio subprocess, no sandbox", lambda: _timed(_run_outside(TRUE)), EXECUTIONS)
        others = [Contender(name, _later(execute), SLOW_ROUNDS) for name, execute in found.executors.items()]
        await compete([spawn, skep, local, *others])
    ratio = skep.median / spawn.median
    goal = _goal((ratio <= 2, f"{ratio:.2f} of at most 2 x the floor"))
    return _times("warm exec of `/bin/true`", [spawn, skep, local, *others], goal)


async def _timed(work: Awaitable[None]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def _run_inside(sandbox: Sandbox, command: Sequence[str]) -> None:
    assert (await sandbox.run(command)).ok


async def _run_outside(command: Sequence[str]) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    await process.communicate()
    assert process.returncode == 0


def _times(what: str, contenders: Sequence[Contender], goal: str) -> list[Row]:
    floor = contenders[0].median
    return [
        [
            what if contender is contenders[0] else "",
            contender.name,
            f"{contender.median * 1000:.2f} ms",
            f"{contender.p95 * 1000:.2f} ms",
            f"{contender.median / floor:.2f} x",
            goal if contender.name == "Skep" else "",
        ]
        for contender in contenders
    ]


# ---- rates ------------------------------------------------------------------------------------------------------


async def _throughput(name: str, command: Sequence[str]) -> list[Row]:
    async with _several(AT_ONCE) as sandboxes:
        outside = Contender("outside", lambda: _rate([partial(_run_outside, command)] * AT_ONCE), RATES)
        one = Contender(
            "Skep, one sandbox", lambda: _rate([partial(_run_inside, sandboxes[0], command)] * AT_ONCE), RATES
        )
        eight = Contender(
            f"Skep, {AT_ONCE} sandboxes",
            lambda: _rate([partial(_run_inside, sandbox, command) for sandbox in sandboxes]),
            RATES,
        )
        await compete([outside, one, eight])
    return _rates(f"{AT_ONCE} commands at once: {name}", "/s", [outside, one, eight], least=0.8)


@asynccontextmanager
async def _several(count: int) -> AsyncIterator[list[Sandbox]]:
    sandboxes = [await Sandbox.create() for _ in range(count)]
    try:
        yield sandboxes
    finally:
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))


async def _rate(workers: Sequence[Callable[[], Awaitable[None]]]) -> float:
    """Return how many commands a second the workers get through together."""
    left = iter(range(COMMANDS))

    async def work(act: Callable[[], Awaitable[None]]) -> None:
        for _ in left:
            await act()

    began = time.perf_counter()
    await asyncio.gather(*map(work, workers))
    return COMMANDS / (time.perf_counter() - began)


async def _files() -> list[Row]:
    data = os.urandom(FILE_BYTES)
    with _folder("skep-bench-files-") as place:
        async with Sandbox.create(f"{place}/workspace") as sandbox:
            host = Contender("the host's own write and read (floor)", _later(lambda: _host_file(Path(place), data)), 20)
            skep = Contender("Skep", lambda: _skep_file(sandbox, data), 20)
            await compete([host, skep])
    return _rates("write and read a 10 MB file", " MB/s", [host, skep], least=0.5)


def _host_file(place: Path, data: bytes) -> float:
    began = time.perf_counter()
    (place / "file").write_bytes(data)
    assert len((place / "file").read_bytes()) == len(data)
    return 2 * len(data) / MB / (time.perf_counter() - began)


async def _skep_file(sandbox: Sandbox, data: bytes) -> float:
    began = time.perf_counter()
    await sandbox.files.write("file", data)
    assert len(await sandbox.files.read("file")) == len(data)
    return 2 * len(data) / MB / (time.perf_counter() - began)


async def _stream() -> list[Row]:
    async with Sandbox.create() as sandbox:
        grown = await _growth(sandbox) / MB
        local = Contender("asyncio subprocess, no sandbox", _local_stream, RATES)
        ours = Contender("Skep", lambda: _drained(sandbox), RATES)
        await compete([local, ours])
    rows = _rates("stream 100 MB of stdout", " MB/s", [local, ours], least=0)
    fast, bounded = ours.median >= 200, grown < 16
    goal = _goal((fast, f"{ours.median:,.0f} of at least 200 MB/s"), (bounded, f"{grown:.1f} MB more memory"))
    rows[-1][-1] = goal
    return rows


async def _growth(sandbox: Sandbox) -> int:
    """Return how much more memory this process takes at most while it streams, for the first time."""
    # Later streams would look free: they use again what the first one had.
    _forget_peak()
    before = _memory("VmRSS")
    await _drained(sandbox)
    return _memory("VmHWM") - before


async def _drained(sandbox: Sandbox) -> float:
    process = await sandbox.start(["/usr/bin/head", "-c", str(STREAM_BYTES), "/dev/zero"])
    began, size = time.perf_counter(), 0
    async for chunk in process.stdout:
        size += len(chunk)
    took = time.perf_counter() - began
    await process.wait()
    process.release()
    assert size == STREAM_BYTES
    return size / MB / took


async def _local_stream() -> float:
    process = await asyncio.create_subprocess_exec("head", "-c", str(STREAM_BYTES), "/dev/zero", stdout=PIPE)
    assert process.stdout is not None
    began, size = time.perf_counter(), 0
    while chunk := await process.stdout.read(1 << 20):
        size += len(chunk)
    took = time.perf_counter() - began
    await process.wait()
    return size / MB / took


def _rates(what: str, unit: str, contenders: Sequence[Contender], *, least: float) -> list[Row]:
    floor = contenders[0].median
    rows = []
    for contender in contenders:
        ratio = contender.median / floor
        goal = _goal((ratio >= least, f"{ratio:.0%} of at least {least:.0%}")) if contender is not contenders[0] else ""
        figures = [f"{contender.median:,.0f}{unit}", f"{contender.least:,.0f}{unit}", f"{ratio:.2f} x"]
        rows.append([what if contender is contenders[0] else "", contender.name, *figures, goal])
    return rows


# ---- many -------------------------------------------------------------------------------------------------------


async def _many() -> list[Row]:
    """Make many sandboxes, all at once, and weigh them while they idle."""
    spare().drop()
    own = _memory("VmRSS")
    began = time.perf_counter()
    sandboxes = await _made(MANY)
    took = time.perf_counter() - began
    idle = [_weight(sandbox) for sandbox in sandboxes]
    charged = [_charged(sandbox) for sandbox in sandboxes]
    ours = _memory("VmRSS") - own
    kept = spare()._launcher
    extra = _proportional(kept.pid) if kept is not None else 0
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    each = sum(idle) / MANY / MB
    goal = _goal((each <= 5, f"{each:.2f} of at most 5 MB"))
    wall = [f"{took:.2f} s", "", f"{took / MANY * 1000:.1f} ms each", ""]
    weight = [f"{each:.2f} MB", f"{max(idle) / MB:.2f} MB", "", goal]
    return [
        [f"{MANY} sandboxes, each running one command", "Skep", *wall],
        ["memory of an idle sandbox", "its bwrap and agent (PSS)", *weight],
        ["", "its control group, the kernel's part included", f"{sum(charged) / MANY / MB:.2f} MB", "", "", ""],
        ["", "the controller", f"{ours / MANY / MB:.2f} MB", "", "", ""],
        ["", "the spare launcher, one per process", f"{extra / MB:.2f} MB", "", "", ""],
    ]


async def _made(count: int) -> list[Sandbox]:
    sandboxes: list[Sandbox] = []
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            sandboxes.append(await Sandbox.create())
            assert (await sandboxes[-1].run(TRUE)).ok

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return sandboxes


def _weight(sandbox: Sandbox) -> int:
    assert isinstance(sandbox, BubblewrapSandbox)
    return sum(map(_proportional, _tree(sandbox.launcher.pid)))


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from _tree(int(child))


def _proportional(pid: int) -> int:
    """Return the memory of a process, what it shares divided among those who do; all of it where that is hidden."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except PermissionError:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _charged(sandbox: Sandbox) -> int:
    """Return what the kernel charges a sandbox's control group with; nothing where there is none."""
    assert isinstance(sandbox, BubblewrapSandbox)
    group = sandbox.launcher.group
    match group.way:
        case "v2":
            return int(Path(group.folders[""][0], "memory.current").read_text())
        case "v1":
            return int(Path(group.folders["memory"][0], "memory.usage_in_bytes").read_text())
        case "none":
            return 0


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _goal(*parts: tuple[bool, str]) -> str:
    met = "met" if all(good for good, _ in parts) else "**missed**"
    return f"{met}: {'; '.join(said if good else f'**{said}**' for good, said in parts)}"
