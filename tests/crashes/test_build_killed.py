"""A build that is killed with -9 at any moment leaves the old version or the new one, and nothing else for long."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from tests.workspace.market import HOST, Market, running_market, source
from tests.workspace.workbench import contents, need_node, opened, shelf_names, template

from skep.workspace.snapshot.snapshot import Snapshot

PROGRAM = Path(__file__).with_name("build_controller.py")
DEADLINE_S = 60.0
GONE_S = 5.0
#: Where a build stops for us to kill it, and whether the new version is there by then.
STEPS = {
    "choosing versions": False,
    "fetching packages": False,
    "Python packages": False,
    "Node packages": False,
    "writing it to the disk": False,
    "naming it": False,
    "the latest": True,
}
#: The steps that are others when there are packages of Node too.
WITH_NODE = ("fetching packages", "Node packages", "writing it to the disk")


@pytest.fixture
def market() -> Iterator[Market]:
    with running_market() as running:
        slow = "open('/workspace/started', 'w').close(); import time; time.sleep(1000)"
        running.python["slow"] = {"slow-1.0.tar.gz": source("slow", "1.0", slow)}
        yield running


Building = Callable[..., AbstractContextManager[subprocess.Popen[str]]]


@pytest.fixture
def building(market: Market, tmp_path: Path, warm_scripts: Path) -> Building:
    """Build in a process of its own, to its end or up to a step; what was killed has ended once the block has."""

    @contextmanager
    def run(step: str | None = None) -> Iterator[subprocess.Popen[str]]:
        words = [market.python_index, market.node_registry, f"{HOST}={market.upstreams[HOST]}", "garden"]
        command = [str(warm_scripts / "python"), str(PROGRAM), str(tmp_path), *words, *([step] if step else [])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with process:
            try:
                yield process
            finally:
                killed(process)

    return run


def killed(process: subprocess.Popen[str]) -> None:
    """Kill a builder, and wait until nobody is left who could say something."""
    process.kill()
    assert process.stdout is not None
    process.stdout.read()
    process.wait()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} was not told: {''.join(seen)}")


def eventually(holds: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def mounts(home: Path) -> list[str]:
    """Return what is mounted on the host from a home or below it; what others mount is theirs."""
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(home) in line]


def drafts(home: Path) -> list[Path]:
    return [path for path in (home / "snapshots/garden").iterdir() if path.name.startswith(".")]


def anyone_below(folder: Path) -> bool:
    """Say whether some process still has a folder of the build as its root, its place or open."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (process / "mountinfo").read_text():
                return True
        except OSError:
            continue
    return False


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a home with a first version in it, to be copied."""
    home = tmp_path_factory.mktemp("built")
    template(home, "garden", python={"dependencies": ["tinypkg"]})
    with running_market() as market:
        asyncio.run(opened(home, market).build("garden"))
    return home


@pytest.fixture
def before(built: Path, tmp_path: Path) -> Snapshot:
    """Have a first version in the home of the test."""
    subprocess.run(["cp", "-a", f"{built}/.", tmp_path], check=True)
    return opened(tmp_path).latest("garden")


async def settled(home: Path, market: Market, before: Snapshot, kept: dict[str, bytes], *, new: bool) -> None:
    """Check what the next start finds, and that the next build finishes the job and sweeps."""
    snapshots = opened(home, market)
    found = snapshots.versions("garden")
    assert found[0] == before
    assert len(found) == 1 + new
    assert snapshots.latest("garden") == before
    assert contents(before.folder) == kept
    after = await snapshots.build("garden")
    assert snapshots.latest("garden") == after
    assert after.version.startswith("v0002-")
    assert shelf_names(home, "garden") == {before.version, after.version, "latest"}


@pytest.mark.parametrize("step", STEPS)
async def test_a_build_killed_at_the_beginning_of_a_step(
    step: str, building: Building, market: Market, before: Snapshot, tmp_path: Path
) -> None:
    need_node()
    kept = contents(before.folder)
    nodejs = {"dependencies": ["scripted"]} if step in WITH_NODE else None
    template(tmp_path, "garden", python={"dependencies": ["pear", "sourced"]}, nodejs=nodejs)
    with building(step) as process:
        read_until(process, step)
        process.kill()
    assert eventually(lambda: not anyone_below(tmp_path / "snapshots"), GONE_S)
    assert mounts(tmp_path) == []
    await settled(tmp_path, market, before, kept, new=STEPS[step])


async def test_a_build_killed_while_a_file_is_downloaded(
    building: Building, market: Market, before: Snapshot, tmp_path: Path
) -> None:
    kept = contents(before.folder)
    template(tmp_path, "garden", python={"dependencies": ["heavy", "pear"]})
    market.held = "/files/heavy"
    with building() as process:
        assert market.waiting.wait(DEADLINE_S)
        process.kill()
    market.held = ""
    market.gate.set()
    await settled(tmp_path, market, before, kept, new=False)
    await opened(tmp_path, market).cache.prune()
    assert not list((tmp_path / "packages/cache/uv").glob(".tmp*"))


async def test_a_build_killed_while_a_package_builds_itself(
    building: Building, market: Market, before: Snapshot, tmp_path: Path
) -> None:
    kept = contents(before.folder)
    template(tmp_path, "garden", python={"dependencies": ["slow"]})
    with building() as process:
        started = lambda: any((draft / "tree/started").exists() for draft in drafts(tmp_path))  # noqa: E731
        assert eventually(started, DEADLINE_S)
        process.kill()
    assert eventually(lambda: not anyone_below(tmp_path / "snapshots"), GONE_S)
    market.python["slow"] = {"slow-1.0.tar.gz": source("slow", "1.0", "pass")}
    await settled(tmp_path, market, before, kept, new=False)


@pytest.mark.parametrize("seed", range(4))
async def test_a_build_killed_at_any_moment(
    seed: int, building: Building, market: Market, before: Snapshot, tmp_path: Path
) -> None:
    """The moment is drawn anew for each seed, over as long as a whole build takes; all of it must hold anywhere."""
    kept = contents(before.folder)
    template(tmp_path, "garden", python={"dependencies": ["heavy", "pear", "chestnut"]})
    with building() as process:
        read_until(process, "choosing versions")
        began = time.monotonic()
        moment = random.Random(seed).uniform(0, 2.0)
        eventually(lambda: process.poll() is not None or time.monotonic() - began > moment, DEADLINE_S)
        process.kill()
    snapshots = opened(tmp_path, market)
    latest = snapshots.latest("garden")
    assert latest in snapshots.versions("garden")
    assert contents(before.folder) == kept
    after = await snapshots.build("garden")
    assert (after.tree / ".venv").is_dir()
    assert shelf_names(tmp_path, "garden") == {before.version, after.version, "latest"}


async def test_what_a_killed_build_left_is_also_swept_by_collecting(
    building: Building, market: Market, before: Snapshot, tmp_path: Path
) -> None:
    snapshots = opened(tmp_path, market)
    template(tmp_path, "garden", python={"dependencies": ["pear"]})
    with building("writing it") as process:
        read_until(process, "writing it")
        left = drafts(tmp_path)
        assert left
        assert snapshots.collect(set()) == []
        assert drafts(tmp_path) == left, "somebody is still building there"
        killed(process)
    assert eventually(lambda: not anyone_below(tmp_path / "snapshots"), GONE_S)
    assert snapshots.collect(set()) == []
    assert shelf_names(tmp_path, "garden") == {before.version, "latest"}


async def test_a_version_is_not_collected_before_it_is_the_latest(
    building: Building, market: Market, before: Snapshot, tmp_path: Path
) -> None:
    snapshots = opened(tmp_path, market)
    template(tmp_path, "garden", python={"dependencies": ["pear"]})
    with building("the latest") as process:
        read_until(process, "the latest")
        assert len(snapshots.versions("garden")) == 2
        assert snapshots.collect(set()) == []
        killed(process)
    (removed,) = snapshots.collect(set())  # nobody holds it any more, and it never became the latest
    assert removed != before


async def test_a_first_build_that_was_killed_before_the_end_is_taken_up(
    building: Building, market: Market, tmp_path: Path
) -> None:
    template(tmp_path, "garden", python={"dependencies": ["pear"]})
    with building("the latest") as process:
        read_until(process, "the latest")
        process.kill()
    told: list[str] = []
    built = await opened(tmp_path, market).ready("garden", told.append)
    assert built.version.startswith("v0001-")
    assert told[-1] == f"{built.version} holds exactly this"
