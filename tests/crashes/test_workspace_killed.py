"""Killed with -9 at any moment of any change, a workspace is what it was before or what it was to become."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crashes.workspace_deeds import DEEDS, leftovers, make_snapshot, open_workspaces
from tests.programs import started

from skep.sandbox.erase import erase
from skep.sandbox.layering import layering as machine_layering
from skep.workspace.grounds import Layering

KILLER = Path(__file__).with_name("workspace_killer.py")
CONTROLLER = Path(__file__).with_name("workspace_controller.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    make_snapshot(folder)
    yield folder
    erase(str(folder), folder.stat().st_ino)


@pytest.fixture
def quick() -> Iterator[Path]:
    """Give a folder in memory where there is one: hundreds of lives wait for the disk else."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="skep-lives-", dir=memory) as folder:
        yield Path(folder)


#: What takes another way without layers; of its children a fork makes each like a clone there.
COPYING = ["create", "checkpoint", "rollback", "clone", "destroy"]
CHANGES = [*((deed, "overlay") for deed in DEEDS), *((deed, "copy") for deed in COPYING)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("deed", "layering"), CHANGES)
def test_a_kill_before_any_call_that_changes_a_file_leaves_the_old_or_the_new_state(
    deed: str, layering: Layering, quick: Path, warm_scripts: Path
) -> None:
    ran = subprocess.run(
        [warm_scripts / "python", KILLER, quick, layering, deed], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    outcome = json.loads(ran.stdout)
    assert outcome["wrong"] == []
    assert outcome["lives"] > 5


def need(layering: Layering) -> None:
    if layering == "overlay" and machine_layering() == "none":
        if os.environ.get("CI"):
            pytest.fail("this machine refuses overlays, so half of the tests would not run")
        pytest.skip("this machine refuses overlays: see skep doctor")


SEAL = ["new upper", "sealed", "swapped"]
COPY = ["copied", "kept"]
BACK = ["new upper", "rolled back", "swapped"]
CHILD = ["frozen", "manifest", "tree", "mark"]
PHASES: dict[Layering, dict[str, list[str]]] = {
    "overlay": {
        "checkpoint": SEAL,
        "busy_checkpoint": ["new upper", "sealed", "busy", *COPY],
        "rollback": BACK,
        "busy_rollback": BACK,
        "fork": [*SEAL, *CHILD],
        "busy_fork": ["new upper", "sealed", "busy", "copied"],
    },
    "copy": {"busy_checkpoint": COPY, "busy_rollback": ["rolled back"], "busy_fork": ["copied", "tree"]},
}
CASES = [
    (layering, deed, phase) for layering, deeds in PHASES.items() for deed, phases in deeds.items() for phase in phases
]


@pytest.mark.parametrize(("layering", "deed", "phase"), CASES)
async def test_a_kill_while_a_sandbox_runs_loses_nothing_that_was_written(
    layering: Layering, deed: str, phase: str, home: Path, warm_scripts: Path
) -> None:
    """What commands had written before is in the workspace, or in the checkpoint of the state that was left."""
    need(layering)
    command = [warm_scripts / "python", CONTROLLER, home, layering, deed, phase]
    ran = await asyncio.to_thread(subprocess.run, command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == -signal.SIGKILL, f"{ran.returncode}: {ran.stderr}"
    workspaces = open_workspaces(home, layering)
    early, *later = workspaces.show("hv-one").checkpoints
    assert len(later) <= 1, "the checkpoint is there or it is not"
    if "rollback" in deed and later:
        assert await log_of(home, layering) == [1], "it has returned"
        await workspaces.rollback("hv-one", later[0].id)
    written = await log_of(home, layering)
    assert written[: len(ran.stdout.split())] == [int(number) for number in ran.stdout.split()]
    await workspaces.rollback("hv-one", early.id)
    assert await log_of(home, layering) == [1]
    for child in [manifest.id for manifest in workspaces.list() if manifest.parent]:
        assert (await log_of(home, layering, child))[:2] == [1, 2]
        await workspaces.destroy(child)
    assert not leftovers(home, layering)


async def log_of(home: Path, layering: Layering, name: str = "hv-one") -> list[int]:
    async with open_workspaces(home, layering).enter(name) as sandbox:
        return [int(line) for line in (await sandbox.files.read("log", limit_bytes=64 << 20)).split()]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("layering", "kills"), [("overlay", 10), ("copy", 4)])
async def test_a_kill_at_a_random_moment_loses_nothing_that_was_written(
    layering: Layering, kills: int, home: Path, warm_scripts: Path
) -> None:
    need(layering)
    chance = random.Random(2026)
    told = 0
    for _ in range(kills):
        with started(
            [warm_scripts / "python", CONTROLLER, home, layering, "everything"],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            time.sleep(chance.uniform(0, 0.25))  # the random moment itself
            process.kill()
            lines += process.stdout.readlines()
        told += sum(line.endswith(b"\n") for line in lines)
        assert len(await log_of(home, layering)) >= told
        workspaces = open_workspaces(home, layering)
        assert not workspaces.census().damaged
        assert not workspaces.lost()
    for manifest in workspaces.list():
        if manifest.parent:
            await workspaces.destroy(manifest.id)
    assert not leftovers(home, layering)


def test_the_killer_finds_what_is_not_one_step(quick: Path) -> None:
    """Control: a change that is made in two steps does not pass."""
    program = f"""
import tests.crashes.workspace_deeds as deeds
import tests.crashes.workspace_killer as killer

async def two_steps(workspaces):
    tree = deeds.upper(workspaces, "hv-one")
    (tree / "kept").unlink()
    (tree / "kept").write_text("new")

deeds.DEEDS["two steps"] = (deeds.furnished, two_steps)
killer.sys.argv = ["killer", {str(quick)!r}, "copy", "two steps"]
killer.main()
"""
    ran = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["wrong"]
