"""Workspaces whose sandboxes are on machines of a cloud: their files are there, and home again, and never older."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.clouds import providers
from tests.clouds.lives import WORKSPACE, workspaces
from tests.clouds.providers import Provider
from tests.workspace.conftest import make_snapshot

from skep.errors import LimitReached, SkepError, Unavailable, WorkspaceDamaged
from skep.sandbox.erase import erase
from skep.sandbox.limits import Limits
from skep.workspace.workspace import Workspace
from skep.workspace.workspaces import Workspaces

ROOT = Path(__file__).parents[2]
#: What each cloud lets a controller die in: the steps are the same, and one of the SDKs takes seconds to start.
PHASES = {
    "e2b": ("going", "carried", "out", "working", "fetched", "came home"),
    "daytona": ("carried", "working", "came home"),
}


@pytest.fixture(scope="module", params=providers.NAMES)
def running(request: pytest.FixtureRequest) -> Iterator[Provider]:
    with providers.run(request.param) as provider:
        yield provider


@pytest.fixture
def cloud(running: Provider) -> Iterator[Provider]:
    yield running
    running.mend()
    for machine in running.machines():
        running.kill(machine)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    make_snapshot(folder)
    yield folder
    erase(str(folder), folder.stat().st_ino)


@pytest.fixture
async def there(home: Path, cloud: Provider) -> AsyncIterator[Workspaces]:
    """Workspaces on the cloud, of which there is one."""
    found = workspaces(home, cloud.name, cloud.options)
    await found.create(WORKSPACE, labels={"account": "bees", "session": "s-1"})
    yield found


def here(home: Path, cloud: Provider, **more: Any) -> Workspaces:
    """Return the same workspaces with sandboxes of this machine."""
    return workspaces(home, "bubblewrap", cloud.options, **more)


def tree_of(found: Workspaces) -> Path:
    return found.trees.tree(found.show(WORKSPACE).upper)


def described(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Say of everything in a folder all that has to be kept."""
    seen: dict[str, tuple[Any, ...]] = {}
    names: dict[int, str] = {}
    for path in sorted(folder.rglob("*")):
        found, name = path.lstat(), str(path.relative_to(folder))
        content: object = None
        if stat.S_ISREG(found.st_mode):
            first = names.setdefault(found.st_ino, name)
            notes = {one: os.getxattr(path, one) for one in os.listxattr(path) if one.startswith("user.")}
            content = (first, found.st_size, hashlib.sha256(path.read_bytes()).hexdigest(), notes)
        elif path.is_symlink():
            content = path.readlink()
        seen[name] = (stat.filemode(found.st_mode), found.st_mtime_ns, content)
    return seen


_PLANT = """
mkdir -p empty deep/er 'odd
name' && cd deep/er
echo one > a; ln a ../../b; ln -s /etc/passwd out; ln -s ../nowhere dangling; mkfifo pipe
printf 'x' > "$(printf 'byte\\377')"
truncate -s 20M holes; printf end >> holes; head -c 700000 /dev/urandom > large
setfattr -n user.note -v kept a 2>/dev/null || true
chmod 640 a; chmod 755 large; chmod 550 ../../empty; touch -d '1999-12-31 23:59:59.123456789 UTC' a ../../empty
"""


async def test_files_of_every_kind_are_the_same_there_and_home_again(
    home: Path, cloud: Provider, there: Workspaces
) -> None:
    async with here(home, cloud).hold(WORKSPACE) as workspace:
        assert (await (await workspace.sandbox()).run(_PLANT)).ok
    before = described(tree_of(there))
    async with there.hold(WORKSPACE) as workspace:
        sandbox = await workspace.sandbox()
        assert sandbox.mechanism == cloud.name
        (labels,) = cloud.machines().values()
        assert labels.items() >= {"account": "bees", "session": "s-1", "workspace": WORKSPACE}.items()
        seen = await sandbox.run("stat -c '%A %Y' deep/er/a empty; cat b; mv b deep/c; ln deep/c b; stat -c %h b")
        assert seen.text.split("\n")[:4] == ["-rw-r----- 946684799", "dr-xr-x--- 946684799", "one", "3"]
        assert (await sandbox.run("rm deep/c; echo new > leaf; chmod 000 deep/er")).ok
    assert stat.S_IMODE((tree_of(there) / "deep/er").stat().st_mode) == 0
    (tree_of(there) / "deep/er").chmod(0o755)
    after = described(tree_of(there))
    assert after["leaf"][2] is not None
    before.pop("deep")  # it was written to
    assert {name: after[name] for name in before} == before
    assert (tree_of(there) / "deep/er/holes").stat().st_blocks < 1000
    assert there.show(WORKSPACE).out is None and not cloud.machines()


async def test_states_are_kept_returned_to_and_copied_as_anywhere_while_something_runs(there: Workspaces) -> None:
    async with there.hold(WORKSPACE) as workspace:
        sandbox = await workspace.sandbox()
        busy = await sandbox.start("i=0; while :; do echo $((i+=1)) > count; done")
        await sandbox.run("echo sown > bed; until [ -s count ]; do :; done")
        kept = await workspace.checkpoint("kept")
        await sandbox.run("echo trampled > bed")
        assert {one.path: one.verb for one in (await workspace.diff("kept")).files}["bed"] == "changed"
        (fork,) = await there.fork(WORKSPACE, ["meadow"])
        assert (there.trees.tree(fork.upper) / "bed").read_text() == "trampled\n"
        assert await sandbox.alive()
        busy.release()
        await workspace.rollback(kept.id)
        sandbox = await workspace.sandbox()
        assert (await sandbox.run("cat bed")).text == "sown\n"
    assert (tree_of(there) / "bed").read_text() == "sown\n"


async def test_a_workspace_goes_from_the_cloud_to_this_machine_and_back(
    home: Path, cloud: Provider, there: Workspaces
) -> None:
    for number, found in enumerate((there, here(home, cloud), there, here(home, cloud))):
        async with found.hold(WORKSPACE) as workspace:
            assert (await (await workspace.sandbox()).run("echo line >> log; wc -l < log")).text == f"{number + 1}\n"
    assert not cloud.machines()


def killed(home: Path, cloud: Provider, *phases: str) -> list[str]:
    """Let a controller die for each phase; return the lines that were written by then."""
    words = [sys.executable, "-m", "tests.clouds.lives", str(home), cloud.name, json.dumps(cloud.options), *phases]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in json.loads(done.stdout) if line]


async def refused(found: Workspaces, kind: type[SkepError], words: str) -> None:
    """Expect every way to the files of a workspace to be refused, with the way out."""
    async with found.hold(WORKSPACE) as workspace:
        for way in (Workspace.sandbox, Workspace.checkpoint, Workspace.diff, Workspace.freeze):
            with pytest.raises(kind, match=words) as no:
                await way(workspace)
            assert f"skep workspace fetch {WORKSPACE} --abandon" in (no.value.hint or "")


async def test_whatever_a_controller_dies_in_the_next_one_has_every_file_or_none_and_no_machine_is_forgotten(
    home: Path, cloud: Provider, there: Workspaces
) -> None:
    written = killed(home, cloud, *PHASES[cloud.name], "working")
    assert written[-2:] == ["came home", "working"]
    out = there.show(WORKSPACE).out
    assert out is not None and out.stage == "out" and [*cloud.machines()] == [out.machine]
    cloud.lose_touch()
    for found in (there, here(home, cloud)):
        await refused(found, Unavailable, f"the newest files .* are on machine {out.machine} of {cloud.name}")
    cloud.mend()
    async with there.hold(WORKSPACE) as workspace:
        sandbox = await workspace.sandbox()
        assert sandbox.id == out.machine
        assert (await sandbox.run("cat log")).text.splitlines() == written
    assert (tree_of(there) / "log").read_text().splitlines() == written
    assert there.show(WORKSPACE).out is None and not cloud.machines()


async def test_a_machine_that_is_gone_is_told_with_what_is_lost_and_a_person_may_go_on_with_what_is_here(
    home: Path, cloud: Provider, there: Workspaces
) -> None:
    async with there.hold(WORKSPACE) as workspace:
        sandbox = await workspace.sandbox()
        await sandbox.run("echo sown > bed")
        await workspace.checkpoint()
        await sandbox.run("echo watered > bed")
        cloud.kill(sandbox.id)
        with pytest.raises(WorkspaceDamaged, match="everything since is lost"):
            while await (await workspace.sandbox()).alive():
                pass
    for found in (there, here(home, cloud)):
        await refused(found, WorkspaceDamaged, f"machine {sandbox.id} .* there no more.*everything since is lost")
    assert (await there.fetch(WORKSPACE, abandon=True)).out is None
    async with there.hold(WORKSPACE) as workspace:
        assert (await (await workspace.sandbox()).run("cat bed")).text == "sown\n"


async def test_what_is_more_than_a_workspace_may_hold_stays_there_until_some_of_it_is_removed(
    cloud: Provider, there: Workspaces
) -> None:
    async with there.hold(WORKSPACE) as workspace:
        sandbox = await workspace.sandbox()
        await sandbox.run("mkdir many; cd many; touch $(seq 3000)")
        workspace.grounds = replace(workspace.grounds, limits=Limits(inodes=1))
        with pytest.raises(LimitReached, match="holds more than"):
            await workspace.checkpoint()
    assert [*cloud.machines()] == [sandbox.id]
    async with there.hold(WORKSPACE) as workspace:
        again = await workspace.sandbox()
        assert again.id == sandbox.id
        assert (await again.run("ls many | wc -l; rm -r many")).text == "3000\n"
    assert not cloud.machines()


@pytest.mark.service
@pytest.mark.parametrize("name", providers.NAMES)
async def test_a_workspace_goes_to_the_real_service_and_comes_home(home: Path, name: str) -> None:
    if not os.environ.get(f"{name.upper()}_API_KEY"):
        pytest.skip(f"set {name.upper()}_API_KEY to run this at the service itself")
    found = workspaces(home, name, {})
    await found.create(WORKSPACE, labels={"account": "skep-tests"})
    async with found.hold(WORKSPACE) as workspace:
        sandbox = await workspace.sandbox()
        assert (await sandbox.run(_PLANT)).ok
        await workspace.checkpoint("planted")
        await sandbox.pause()
        await sandbox.resume()
        assert (await sandbox.run("cat b; echo two > b")).text == "one\n"
    assert (tree_of(found) / "b").read_text() == "two\n"
    assert found.show(WORKSPACE).out is None
