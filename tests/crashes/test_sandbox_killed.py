"""When a controller is killed with -9, everything inside its sandboxes ends and the next controller cleans up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skep.sandbox.cgroups import Place
from skep.sandbox.leftovers import records_folder, sweep
from skep.sandbox.sandbox import Sandbox

PROGRAM = Path(__file__).with_name("sandbox_controller.py")
GONE_S = 2.0
CLEAN_S = 10.0

Identity = tuple[int, str]


def eventually(holds: Callable[[], bool], within_s: float) -> bool:
    """Poll until something holds; say whether it did in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def stat_of(pid: int) -> tuple[str, int, str] | None:
    """Return the state, the parent and the start time of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1]), fields[19]


def descendants(pid: int) -> set[Identity]:
    """Return all processes below one, each known by its number and start time."""
    everyone = {pid: stat_of(pid) for pid in all_pids()}
    found, above = set(), {pid}
    while above:
        below = {child for child, stat in everyone.items() if stat and stat[1] in above}
        found |= {(child, stat[2]) for child in below if (stat := everyone[child])}
        above = below
    return found


def runs(process: Identity) -> bool:
    # A process that nobody has collected yet runs no more; who collects the outermost one is the system's affair.
    found = stat_of(process[0])
    return found is not None and found[2] == process[1] and found[0] not in "ZX"


def namespaces(processes: set[Identity]) -> set[str]:
    """Return the process namespaces of some processes, as far as they can be seen, without our own."""
    return {place for pid, _ in processes if (place := namespace(pid))} - {namespace(os.getpid())}


def namespace(pid: int) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return ""


def anyone_in(inside: set[str]) -> bool:
    return any(namespace(pid) in inside for pid in all_pids())


@dataclass(slots=True)
class Held:
    """What a controller held at the moment of its death."""

    processes: set[Identity]
    namespaces: set[str]
    records: dict[Path, str]

    def gone(self) -> bool:
        return not any(map(runs, self.processes)) and not anyone_in(self.namespaces)

    def cleaned(self) -> bool:
        sweep()
        return not any(path.exists() for path in (*self.records, *self.folders()))

    def folders(self) -> Iterator[Path]:
        for text in self.records.values():
            content = json.loads(text)
            yield from (Path(folder) for folder, _ in content["groups"].values())
            if content["throwaway"]:
                yield Path(content["throwaway"][0])


@dataclass(slots=True)
class Controller:
    """A controller in a process of its own, with a folder and control groups that nobody else uses."""

    deed: str
    temporary: Path
    folder: Path | None = None
    groups: list[Path] = field(default_factory=list)
    said: dict[str, object] = field(default_factory=dict)
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), self.deed, *([str(self.folder)] if self.folder else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for group in self.groups:
            (group / "cgroup.procs").write_text(str(self.process.pid))

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def go(self) -> None:
        """Let it begin, and return when it is in the midst of its deed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            self.said.update(json.loads(line))
            if "now" in self.said:
                return
        raise AssertionError(f"the controller ended by itself with {self.process.wait()}")

    def held(self) -> Held:
        below = descendants(self.process.pid)
        below -= {process for process in below if process[0] == self.said.get("child")}
        return Held(below, namespaces(below), {path: path.read_text() for path in self._records()})

    def _records(self) -> set[Path]:
        opened = Path(f"/proc/{self.process.pid}/fd").iterdir()
        targets = set()
        for fd in opened:
            with suppress(FileNotFoundError):
                targets.add(fd.readlink())
        return {target for target in targets if target.parent == records_folder() and target.exists()}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="skep-crash-") as folder:
        yield Path(folder)


@contextmanager
def own_groups() -> Iterator[list[Path]]:
    """Give control groups that only one controller uses, where this user can make them."""
    place = Place.find()
    parents = place.parents.values() if place.way == "v1" else ()
    groups = [Path(parent) / f"crash-{os.urandom(6).hex()}" for parent in parents]
    for group in groups:
        group.mkdir()
    try:
        yield groups
    finally:
        for folder in (path for group in groups for path in (*group.iterdir(), group) if path.is_dir()):
            folder.rmdir()


async def works(folder: Path) -> bool:
    async with Sandbox.create(folder) as sandbox:
        return (await sandbox.run("echo again > again && cat again")).text == "again\n"


DEEDS = ["run", "stream", "terminal", "shell", "daemon", "background", "pause", "forks", "write", "stop", "idle"]


@pytest.mark.parametrize(
    ("deed", "kept"), [*((deed, True) for deed in DEEDS), *((deed, False) for deed in ("run", "write", "stop"))]
)
async def test_nothing_survives_the_controller(deed: str, kept: bool, temporary: Path) -> None:
    """Processes end within two seconds, the sweep removes the rest, and the workspace can be used at once."""
    folder = temporary / "workspace" if kept else None
    with own_groups() as groups:
        with Controller(deed, temporary, folder, groups) as controller:
            controller.go()
            held = controller.held()
            assert held.records or deed == "stop"
            assert held.namespaces or deed in ("stop", "idle")
        assert eventually(held.gone, GONE_S), [process for process in held.processes if runs(process)]
        assert eventually(held.cleaned, CLEAN_S), [str(path) for path in held.folders() if path.exists()]
        assert all(not any(path.is_dir() for path in group.iterdir()) for group in groups)
    assert sorted(temporary.iterdir()) == ([folder] if folder else [])
    if folder is not None:
        assert not list(folder.glob(".skep-*")), "a file that was being written is left"
        assert await works(folder)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("deed", ["create", "stop"])
def test_no_moment_of_a_life_leaves_anything_behind(deed: str, temporary: Path) -> None:
    """Kill at random moments of making, using and stopping: the sweep finds all there is."""
    chance = random.Random(2026)
    for _ in range(15):
        with own_groups() as groups:
            with Controller(deed, temporary, None, groups) as controller:
                controller.go()
                time.sleep(chance.uniform(0, 0.08 if deed == "create" else 0.03))  # the random moment itself
                controller.process.send_signal(signal.SIGSTOP)
                held = controller.held()
            assert eventually(held.gone, GONE_S)
            assert eventually(lambda: nothing_left(groups, temporary), CLEAN_S), left(groups, temporary)


def nothing_left(groups: list[Path], temporary: Path) -> bool:
    sweep()
    return not left(groups, temporary)


def left(groups: list[Path], temporary: Path) -> list[str]:
    folders = [str(path) for group in groups for path in group.iterdir() if path.is_dir()]
    records = [str(path) for path in records_folder().glob("*.json") if str(temporary) in text_of(path)]
    return [*folders, *records, *map(str, temporary.iterdir())]


def text_of(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text()
    return ""


def test_a_forked_child_of_the_controller_keeps_nothing_alive(temporary: Path) -> None:
    """A child that the controller forked (a process pool, say) holds neither its sandboxes nor their records."""
    with Controller("fork", temporary) as controller:
        controller.go()
        held = controller.held()
        child = controller.said["child"]
        assert isinstance(child, int)
    try:
        assert eventually(held.gone, GONE_S)
        assert eventually(held.cleaned, CLEAN_S)
        assert stat_of(child) is not None
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_next_controller_sweeps_by_itself(temporary: Path) -> None:
    """Nobody has to ask: making a sandbox removes what dead controllers left."""
    with Controller("daemon", temporary) as first:
        first.go()
        held = first.held()
        assert held.records
    with Controller("one", temporary) as second:
        second.go()
        assert eventually(lambda: not any(path.exists() for path in (*held.records, *held.folders())), CLEAN_S)
    assert eventually(lambda: nothing_left([], temporary), CLEAN_S)
