"""What a workspace costs: made, forked, checkpointed, examined, packed away and brought back."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import uv

from bench.contest import GAP_S, Contender, compete
from bench.report import Section
from skep.sandbox.egress.policy import NAMED_SETS
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.sandbox import Sandbox
from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import open_store
from skep.workspace.health.health import examine
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.snapshot import Snapshot
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.templates import Templates
from skep.workspace.workspaces import Workspaces

ROUNDS, INSTALLS = 20, 3
FORKED_MB, FORKS = 1000, 100
TREE_FILES, CHANGED_FILES = 100_000, 1_000
ARCHIVED_MB, ARCHIVES = 500, 3
IMPORT = ["python", "-c", "import pandas"]
LIMITS = Limits(disk_bytes=8 << 30, inodes=1_000_000, memory_bytes=2 << 30)

METHOD = f"""\
The snapshot is that of the template `default`, built in this run. "made" is `Workspaces.create`; "ready" goes on
until `import pandas` is done in the workspace's sandbox. The floor of "ready" is a plain sandbox over a plain copy of
the same environment; the rival is `uv venv`, `uv pip install` and `npm install` of the same packages with warm caches,
outside of any sandbox. Contenders take turns, {ROUNDS} rounds ({INSTALLS} for the rival). A fork is taken of a
workspace with {FORKED_MB} files of 1 MB, all written since it was made, whose sandbox runs. Checkpoint and rollback are
those of a running workspace with {TREE_FILES:,} files of which {CHANGED_FILES:,} were changed since the last one.
Archives hold {ARCHIVED_MB} MB, half of it noise and half of it text, encrypted and verified; the floor is `tar | zstd`
to and from a file, with its usual settings, neither encrypted nor verified.
"""


def measure() -> Section:
    with tempfile.TemporaryDirectory(prefix="skep-bench-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        return asyncio.run(_measure(Path(folder)))


async def _measure(folder: Path) -> Section:
    bench = Bench(folder)
    print("building the snapshot …", flush=True)
    await bench.build()
    rows = []
    for part in (bench.ready, bench.disk, bench.forks, bench.checkpoints, bench.health, bench.archives):
        print(f"measuring {part.__name__} …", flush=True)
        rows += await part()
    return Section(
        "workspace", "Workspaces", METHOD, ("what", "figure", "against", "goal"), rows, notes=bench.described()
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


class Bench:
    """One home with one snapshot, and what is measured in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._home = folder / "home"
        templates = Templates(self._home / "templates")
        self._snapshots = Snapshots(self._home, templates, indexes=Indexes(upstreams=_pinned()))
        self._workspaces = Workspaces(self._home, self._snapshots, limits=LIMITS)
        self._template = templates.show("default")
        self._numbers = count()

    async def build(self) -> None:
        began = time.monotonic()
        self._snapshot: Snapshot = await self._snapshots.build("default", on_progress=lambda _: None)
        self._built_s = time.monotonic() - began

    def described(self) -> str:
        packages = len(self._snapshot.python_packages) + len(self._snapshot.node_packages)
        return (
            f"The snapshot took {self._built_s:.0f} s to build, from empty caches: {packages} packages,"
            f" {self._snapshot.size_bytes / 1e6:.0f} MB."
        )

    async def _made(self) -> str:
        name = f"bench-{next(self._numbers)}"
        await self._workspaces.create(name, snapshot=self._snapshot)
        return name

    async def ready(self) -> list[list[str]]:
        made: list[float] = []
        copy = self._folder / "copy"
        shutil.copytree(self._snapshot.tree, copy, symlinks=True)

        async def workspace() -> float:
            began = time.perf_counter()
            name = await self._made()
            made.append(time.perf_counter() - began)
            async with self._workspaces.enter(name) as sandbox:
                assert (await sandbox.run(IMPORT)).ok
                took = time.perf_counter() - began
            await self._workspaces.destroy(name)
            return took

        async def plain() -> float:
            began = time.perf_counter()
            async with Sandbox.create(copy, adopt=True) as sandbox:
                assert (await sandbox.run(IMPORT)).ok
                return time.perf_counter() - began

        ours, floor = Contender("ready", workspace, ROUNDS), Contender("plain", plain, ROUNDS)
        install = await self._rival()
        rival = Contender("install", install, INSTALLS)
        await compete([ours, floor, rival], gap_s=GAP_S)
        creation = statistics.median(made[1:])
        times = f"uv and npm install, warm caches {rival.median:.2f} s ({rival.median / creation:.0f} x)"
        ratio = f"plain sandbox {_ms(floor.median)} ({ours.median / floor.median:.2f} x)"
        figure = f"{_ms(creation)}, p95 {_ms(_p95(made[1:]))}"
        return [
            ["made from the `default` snapshot", figure, times, "p50 <= 25 ms, >= 100 x"],
            ["ready, to `import pandas`", _ms(ours.median), ratio, "<= 1.3 x"],
        ]

    async def _rival(self) -> Callable[[], Awaitable[float]]:
        caches = self._folder / "caches"
        environment = {**os.environ, "UV_CACHE_DIR": str(caches / "uv"), "npm_config_cache": str(caches / "npm")}
        python = self._template.python.dependencies if self._template.python else ()
        node = self._template.nodejs.dependencies if self._template.nodejs else ()

        def install() -> float:
            with tempfile.TemporaryDirectory(dir=self._folder) as where:
                began = time.perf_counter()
                for command in (
                    [uv.find_uv_bin(), "venv", "--quiet", ".venv", "--python", "/usr/bin/python3"],
                    [uv.find_uv_bin(), "pip", "install", "--quiet", "--python", ".venv/bin/python", *python],
                    ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefer-offline", *node],
                ):
                    subprocess.run(command, cwd=where, env=environment, check=True, capture_output=True)
                return time.perf_counter() - began

        async def act() -> float:
            return await asyncio.to_thread(install)

        await act()  # fills the caches
        return act

    async def disk(self) -> list[list[str]]:
        name = await self._made()
        async with self._workspaces.enter(name) as sandbox:
            await sandbox.run(["true"])
        manifest = self._workspaces.show(name)
        places = [self._home / "workspaces" / name, *(self._home / "trees" / tree for tree in manifest.trees())]
        took = sum(_disk(place) for place in places)
        await self._workspaces.destroy(name)
        return [["disk of a fresh workspace, once used", f"{took / 1000:.0f} kB", "", "<= 100 kB"]]

    @asynccontextmanager
    async def _busy(self, script: str) -> AsyncIterator[tuple[str, Sandbox]]:
        name = await self._made()
        async with self._workspaces.hold(name) as workspace:
            sandbox = await workspace.sandbox()
            done = await sandbox.run(["/usr/bin/python3", "-c", script], timeout_s=290)
            assert done.ok, done.error_text
            yield name, sandbox
        await self._workspaces.destroy(name)

    async def forks(self) -> list[list[str]]:
        script = (
            "import os\nos.mkdir('data')\nblock = os.urandom(1 << 20)\n"
            f"for n in range({FORKED_MB}):\n    open(f'data/{{n}}', 'wb').write(block)\n"
        )
        single: list[float] = []
        async with self._busy(script) as (name, sandbox):
            for round_ in range(6):
                await sandbox.run(f"echo {round_} >note")
                began = time.perf_counter()
                (child,) = await self._workspaces.fork(name, [f"{name}-child-{round_}"])
                single.append(time.perf_counter() - began)
                await self._workspaces.destroy(child.id)
            began = time.perf_counter()
            children = await self._workspaces.fork(name, [f"{name}-many-{number}" for number in range(FORKS)])
            many = time.perf_counter() - began
            for child in children:
                await self._workspaces.destroy(child.id)
        figure = f"{_ms(single[0])} the first, then {_ms(statistics.median(single[1:]))}"
        return [
            [f"fork of a live workspace with {FORKED_MB} MB", figure, "", "<= 30 ms"],
            [f"{FORKS} forks of it", f"{many:.2f} s", "", "<= 2 s"],
        ]

    async def checkpoints(self) -> list[list[str]]:
        plant = (
            f"import os\nfor n in range({TREE_FILES}):\n    d = f'tree/{{n // 100}}'\n"
            "    if n % 100 == 0: os.makedirs(d)\n    open(f'{d}/{n}', 'w').write(str(n))\n"
        )
        change = (
            f"import sys\nfor n in range({CHANGED_FILES}):\n    m = n * {TREE_FILES // CHANGED_FILES}\n"
            "    open(f'tree/{m // 100}/{m}', 'w').write('changed ' + sys.argv[1])\n"
        )
        kept, back = [], []
        async with self._busy(plant) as (name, sandbox):
            await self._workspaces.checkpoint(name, "start")
            for round_ in range(5):
                await sandbox.run(["/usr/bin/python3", "-c", change, str(round_)])
                began = time.perf_counter()
                await self._workspaces.checkpoint(name, f"round-{round_}")
                kept.append(time.perf_counter() - began)
                began = time.perf_counter()
                await self._workspaces.rollback(name, "start")
                back.append(time.perf_counter() - began)
                assert await sandbox.files.read("tree/0/0") == b"0"
        what = f"after {CHANGED_FILES:,} changed files of {TREE_FILES:,}"
        return [
            [f"checkpoint {what}", _ms(statistics.median(kept)), "", "<= 300 ms"],
            [f"rollback {what}", _ms(statistics.median(back)), "", "<= 300 ms"],
        ]

    async def health(self) -> list[list[str]]:
        name = await self._made()
        took = []
        for _ in range(10):
            began = time.perf_counter()
            report = await examine(self._workspaces, name)
            took.append(time.perf_counter() - began)
            assert report.ok, report
        await self._workspaces.destroy(name)
        return [["health check of a `default` workspace", _ms(statistics.median(took)), "", "<= 150 ms"]]

    async def archives(self) -> list[list[str]]:
        source = self._folder / "archived"
        _plant(source)
        times: dict[str, list[float]] = {name: [] for name in ("save", "restore", "pack", "unpack", "again")}
        for round_ in range(ARCHIVES):
            where = self._folder / f"store-{round_}"
            archive = Archive(open_store(str(where / "store")), os.urandom(32), memory=where / "memory")
            times["save"].append(await _timed(archive.save("bench", [str(source)])))
            times["again"].append(await _timed(archive.save("bench", [str(source)])))
            times["restore"].append(await _timed(archive.restore("bench", where / "back")))
            where.mkdir(exist_ok=True)
            packed = where / "packed.tar.zst"
            times["pack"].append(await _shell(f"tar -C {source} -cf - . | zstd -q -o {packed}"))
            (where / "unpacked").mkdir()
            times["unpack"].append(await _shell(f"zstd -q -dc {packed} | tar -C {where}/unpacked -xf -"))
            await asyncio.to_thread(shutil.rmtree, where)
        best = {name: statistics.median(taken) for name, taken in times.items()}
        pack = f"tar, zstd {best['pack']:.2f} s ({best['save'] / best['pack']:.2f} x)"
        unpack = f"zstd, tar {best['unpack']:.2f} s ({best['restore'] / best['unpack']:.2f} x)"
        return [
            [f"archive {ARCHIVED_MB} MB", f"{best['save']:.2f} s", pack, "<= 1.5 x"],
            ["the same again, nothing changed", f"{best['again']:.2f} s", "", ""],
            [f"restore {ARCHIVED_MB} MB", f"{best['restore']:.2f} s", unpack, "<= 1.5 x"],
        ]


def _pinned() -> dict[str, str]:
    """Pin the package hosts to what this machine's resolver says: it may have a mirror at an address of its own."""
    hosts = (*NAMED_SETS["pypi"], *NAMED_SETS["npm"])
    return {host: str(socket.getaddrinfo(host, 443, socket.AF_INET)[0][4][0]) for host in hosts}


def _plant(folder: Path) -> None:
    """Write files of many sizes, half noise and half text."""
    folder.mkdir()
    sizes = [4_000] * 2500 + [40_000] * 1000 + [1 << 20] * 200
    sizes += [8 * MIB] * ((ARCHIVED_MB * 1_000_000 - sum(sizes)) // (8 * MIB))
    line = b"The bees go out in the morning and come back in the evening, number %d.\n"
    for number, size in enumerate(sizes):
        place = folder / str(number // 200)
        place.mkdir(exist_ok=True)
        data = os.urandom(size) if number % 2 else b"".join(line % n for n in range(size // 60))[:size]
        (place / str(number)).write_bytes(data)


async def _timed(work: Awaitable[object]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def _shell(line: str) -> float:
    def run() -> None:
        subprocess.run(["bash", "-ec", f"set -o pipefail; {line}"], check=True)

    return await _timed(asyncio.to_thread(run))


def _disk(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in (folder, *folder.rglob("*")))


def _p95(figures: list[float]) -> float:
    return statistics.quantiles(figures, n=20, method="inclusive")[-1]
