"""What each mechanism costs, side by side: to make a sandbox, to run a command in it, to move files, to keep it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.clouds.daytona import cloud as daytona
from tests.clouds.e2b import cloud as e2b
from tests.docker.daemon import new_daemon

from bench.contest import GAP_S, Contender, compete
from bench.report import Section
from skep.errors import SkepError
from skep.sandbox.mechanisms import MECHANISMS, usable
from skep.sandbox.sandbox import Sandbox

CREATIONS, EXECUTIONS, TRANSFERS, LIVE = 15, 150, 5, 4
FILE_BYTES = 64 << 20
MIB = 1 << 20
TRUE = ["/bin/true"]

METHOD = f"""\
All mechanisms that can be used here, in one run and taking turns, each through the same calls of the contract. Creation
is `Sandbox.create` to the end of a first `/bin/true`, {CREATIONS} times; a command is `/bin/true` in a sandbox that
runs, {EXECUTIONS} times; files are {FILE_BYTES // MIB} MiB written and read again through `files`, {TRANSFERS} times.
Memory is the resident memory of all processes that {LIVE} idle sandboxes add on this machine, and what the controller
grows by, divided by {LIVE}; pages that processes share are counted in each. Docker's engine is one that the benchmark
starts; its own memory is not in the figure. E2B and Daytona are their unmodified SDKs against servers on loopback which
speak their protocol and keep a bubblewrap sandbox for each machine: the figures are what Skep and the SDK add, without
any network or hypervisor.
"""

Row = list[str]


@dataclass(slots=True)
class Entrant:
    """One mechanism, ready to be measured."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""
    #: What stands in the command line of processes that are its own though not this process's children.
    mark: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.remark})" if self.remark else self.name

    async def made(self) -> Sandbox:
        return await Sandbox.create(mechanism=self.name, options=self.options, labels={"account": "bench"})


def measure() -> Section:
    logging.getLogger("skep.sandbox.local").setLevel(logging.ERROR)  # it says each time that it isolates nothing
    absent: dict[str, str] = {}
    with _entrants(absent) as entrants:
        rows = asyncio.run(_measure(entrants, absent))
    reasons = "; ".join(f"{name}: {why}" for name, why in absent.items())
    return Section(
        name="mechanisms",
        title="Mechanisms",
        method=METHOD,
        columns=["what", "by", "p50", "p95 or least", "against bubblewrap"],
        rows=rows,
        notes=f"Not measured here: {reasons}." if reasons else "",
    )


@contextmanager
def _entrants(absent: dict[str, str]) -> Iterator[list[Entrant]]:
    with ExitStack() as at_end:
        found = [Entrant("bubblewrap"), *_docker(at_end, absent)]
        for name, options in (("gvisor", {}), ("local", {"allow_unsafe": True})):
            finding = usable(name, options)
            if finding.usable:
                found.append(Entrant(name, options))
            else:
                absent[name] = finding.why
        found.append(Entrant("e2b", at_end.enter_context(e2b.played()).options, "SDK on loopback"))
        found.append(Entrant("daytona", at_end.enter_context(daytona.served()).options, "SDK on loopback"))
        yield found


def _docker(at_end: ExitStack, absent: dict[str, str]) -> Iterator[Entrant]:
    try:
        engine = new_daemon()
    except pytest.skip.Exception as reason:
        absent["docker"] = str(reason)
        return
    at_end.callback(engine.remove)
    yield Entrant("docker", engine.options, mark=str(engine.folder))


async def _measure(entrants: list[Entrant], absent: dict[str, str]) -> list[Row]:
    working = [one for one in entrants if await _works(one, absent)]
    assert {one.name for one in working} <= set(MECHANISMS)
    return [*await _creation(working), *await _in_live_ones(working, absent), *await _memory(working)]


async def _works(entrant: Entrant, absent: dict[str, str]) -> bool:
    try:
        await _create(entrant)
    except SkepError as error:
        absent[entrant.name] = error.message
        return False
    return True


async def _creation(entrants: Sequence[Entrant]) -> list[Row]:
    contenders = [Contender(one.title, lambda one=one: _create(one), CREATIONS) for one in entrants]  # type: ignore[misc]
    await compete(contenders, gap_s=GAP_S)
    return _times("create to first command done", contenders)


async def _create(entrant: Entrant) -> float:
    began = time.perf_counter()
    sandbox = await entrant.made()
    try:
        assert (await sandbox.run(TRUE)).ok
        return time.perf_counter() - began
    finally:
        await sandbox.stop()


async def _in_live_ones(entrants: Sequence[Entrant], absent: dict[str, str]) -> list[Row]:
    live = [(one.title, await one.made()) for one in entrants]
    try:
        commands = [Contender(title, lambda box=box: _execute(box), EXECUTIONS) for title, box in live]  # type: ignore[misc]
        await compete(commands)
        data = os.urandom(FILE_BYTES)
        able = [(title, box) for title, box in live if await _carries(title, box, data, absent)]
        files = [Contender(title, lambda box=box: _transfer(box, data), TRANSFERS) for title, box in able]  # type: ignore[misc]
        await compete(files)
    finally:
        for _, sandbox in live:
            await sandbox.stop()
    return [*_times("warm exec of `/bin/true`", commands), *_rates(f"write and read {FILE_BYTES // MIB} MiB", files)]


async def _carries(title: str, sandbox: Sandbox, data: bytes, absent: dict[str, str]) -> bool:
    try:
        await _transfer(sandbox, data)
    except SkepError as error:
        absent[f"files of {title}"] = error.message
        return False
    return True


async def _execute(sandbox: Sandbox) -> float:
    began = time.perf_counter()
    assert (await sandbox.run(TRUE)).ok
    return time.perf_counter() - began


async def _transfer(sandbox: Sandbox, data: bytes) -> float:
    began = time.perf_counter()
    await sandbox.files.write("file", data)
    assert len(await sandbox.files.read("file")) == len(data)
    return 2 * len(data) / MIB / (time.perf_counter() - began)


async def _memory(entrants: Sequence[Entrant]) -> list[Row]:
    here = [one for one in entrants if not one.remark]  # what the machine of a cloud takes is not taken here
    weights = [(one.title, await _weight(one)) for one in here]
    first = weights[0][1]
    what = "memory of an idle sandbox"
    return [
        [what if title == weights[0][0] else "", title, f"{weight / MIB:.1f} MiB", "", f"{weight / first:.2f} x"]
        for title, weight in weights
    ]


async def _weight(entrant: Entrant) -> float:
    """Return how much more memory this machine uses per idle sandbox, in bytes."""
    before, own = _processes(entrant), _resident(os.getpid())
    sandboxes = [await entrant.made() for _ in range(LIVE)]
    try:
        for sandbox in sandboxes:
            assert (await sandbox.run(TRUE)).ok
        new = _processes(entrant) - before
        return (sum(map(_resident, new)) + max(0, _resident(os.getpid()) - own)) / LIVE
    finally:
        for sandbox in sandboxes:
            await sandbox.stop()


def _processes(entrant: Entrant) -> set[int]:
    """Find the processes of a mechanism: this process's descendants, and those that its engine has started."""
    roots = {os.getpid()}
    if entrant.mark:
        roots |= {pid for pid in _pids() if entrant.mark in _read(pid, "cmdline")}
    return {pid for pid in _pids() if pid != os.getpid() and _descends(pid, roots)}


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _descends(pid: int, roots: set[int]) -> bool:
    while pid > 1:
        if pid in roots:
            return True
        stat = _read(pid, "stat")
        pid = int(stat.rpartition(")")[2].split()[1]) if stat else 0
    return False


def _resident(pid: int) -> int:
    fields = _read(pid, "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has ended meanwhile


def _times(what: str, contenders: Sequence[Contender]) -> list[Row]:
    first = contenders[0]
    return [
        [
            what if one is first else "",
            one.name,
            f"{one.median * 1000:.2f} ms",
            f"{one.p95 * 1000:.2f} ms",
            f"{one.median / first.median:.2f} x",
        ]
        for one in contenders
    ]


def _rates(what: str, contenders: Sequence[Contender]) -> list[Row]:
    first = contenders[0]
    return [
        [
            what if one is first else "",
            one.name,
            f"{one.median:,.0f} MiB/s",
            f"{one.least:,.0f} MiB/s",
            f"{one.median / first.median:.2f} x",
        ]
        for one in contenders
    ]
