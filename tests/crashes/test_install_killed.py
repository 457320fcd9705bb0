"""Killed with -9 at any moment of an install or a repair, the workspace has all of it or nothing of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.workspace.orchard import Orchard, growing, own_hash, said
from tests.workspace.tree_hash import tree_hash
from tests.workspace.workbench import need_node

from skep.sandbox.layering import layering as machine_layering
from skep.workspace.grounds import Layering
from skep.workspace.health.health import examine
from skep.workspace.holding import Holding, Taken
from skep.workspace.packages.transplant import STAGE
from skep.workspace.workspaces import Workspaces

PROGRAM = Path(__file__).with_name("install_controller.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))}
DEADLINE_S = 60.0
LAYERED = machine_layering() == "overlay"
#: The phases of an install up to the decision, and from then on.
BEFORE = ("trial", "fetched", "tried")
AFTER = ("decided", "staged", "placed", "recorded")
#: Those in which packages of Node are another matter than those of Python.
WITH_NODE = ("fetched", "tried", "decided", "placed")
#: What works once the packages are there.
USES = {
    "install": ("python -c 'import pear, sourced'", "node -e 'require(\"pear\")'"),
    "python": ("python -c 'import pear'",),
}
#: The phases of a repair.
MENDING = ("tried", "decided", "shed", "staged", "placed", "recorded")


def lives(phases: Sequence[str], *, copied: Sequence[str]) -> list[tuple[str, Layering]]:
    """Return where to kill: in every phase with layers; in the telling ones without, where the same code runs."""
    without: list[tuple[str, Layering]] = [(phase, "copy") for phase in (copied if LAYERED else phases)]
    return [(phase, "overlay") for phase in phases] + without if LAYERED else without


@pytest.fixture(scope="module")
def python(warm_scripts: Path) -> Path:
    """Give a Python that has Skep loaded."""
    return warm_scripts / "python"


@pytest.fixture(scope="module")
def orchard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchard]:
    need_node()
    with growing(tmp_path_factory.mktemp("orchard")) as made:
        yield made


def started(python: Path, orchard: Orchard, layering: Layering, *words: str) -> subprocess.Popen[bytes]:
    command = [python, PROGRAM, orchard.home, str(orchard.market.port), layering, *words]
    return subprocess.Popen(command, env=ENVIRONMENT)


def ended(process: subprocess.Popen[bytes]) -> int:
    return process.wait(DEADLINE_S)


def killed_when(process: subprocess.Popen[bytes], holds: Callable[[], bool]) -> None:
    """Kill the controller as soon as something can be seen on the disk."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL


async def free(workspaces: Workspaces, workspace_id: str) -> None:
    """Wait until the lock of a killed controller is gone: a child on its way to another program may have it still."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            Holding.take(workspaces.register.path(workspace_id)).close()
        except Taken:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        else:
            return


async def state(workspaces: Workspaces, workspace_id: str) -> tuple[str, str]:
    """Take hold of a workspace, as whoever uses it next; return the hashes of everything and of the agent's files."""
    await free(workspaces, workspace_id)
    async with workspaces.hold(workspace_id) as workspace:
        sandbox = await workspace.sandbox()
        found = await tree_hash(sandbox), await own_hash(sandbox)
        assert workspace.manifest.installing is None
        assert not (workspace.folder / "install").exists()
        assert STAGE not in await said(sandbox, "ls -A")
    return found


def installed(workspaces: Workspaces, workspace_id: str) -> bool:
    return bool(workspaces.show(workspace_id).packages.python)


@pytest.mark.parametrize(("phase", "layering"), lives([*BEFORE, *AFTER], copied=["decided"]))
async def test_an_install_that_is_killed_is_undone_or_completed(
    python: Path, orchard: Orchard, layering: Layering, phase: str
) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.planted(workspaces)
    before = await state(workspaces, workspace_id)
    deed = "install" if phase in WITH_NODE else "python"
    assert ended(started(python, orchard, layering, workspace_id, deed, phase)) == -signal.SIGKILL
    after = await state(workspaces, workspace_id)
    assert after[1] == before[1]
    assert installed(workspaces, workspace_id) == (phase in AFTER)
    assert (await examine(workspaces, workspace_id)).troubles == ()
    if phase in BEFORE:
        assert after == before
    async with workspaces.enter(workspace_id) as sandbox:
        has = [(await sandbox.run(use)).ok for use in USES[deed]]
    assert has == [phase in AFTER] * len(has)


@pytest.mark.parametrize("layering", ["overlay"] if LAYERED else ["copy"])
@pytest.mark.parametrize("sign", [f"{STAGE}*", ".venv/lib/python3*/site-packages/heavy"])
async def test_an_install_that_is_killed_while_files_are_moving_is_completed(
    python: Path, orchard: Orchard, layering: Layering, sign: str
) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.planted(workspaces)
    mine = (await state(workspaces, workspace_id))[1]
    tree = workspaces.trees.tree(workspaces.show(workspace_id).upper)
    killed_when(started(python, orchard, layering, workspace_id, "heavy"), lambda: any(tree.glob(sign)))
    assert (await state(workspaces, workspace_id))[1] == mine
    assert installed(workspaces, workspace_id)
    assert (await examine(workspaces, workspace_id)).troubles == ()
    async with workspaces.enter(workspace_id) as sandbox:
        assert await said(sandbox, "stat -c %s .venv/lib/python3*/site-packages/heavy/data.bin") == f"{8 << 20}\n"


@pytest.mark.parametrize("layering", ["overlay"] if LAYERED else ["copy"])
async def test_what_was_killed_stands_in_nobodys_way(python: Path, orchard: Orchard, layering: Layering) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.planted(workspaces)
    for phase in ("tried", "decided", "tried"):
        assert ended(started(python, orchard, layering, workspace_id, "python", phase)) == -signal.SIGKILL
        await free(workspaces, workspace_id)
    assert ended(started(python, orchard, layering, workspace_id, "python")) == 0
    await state(workspaces, workspace_id)
    assert (await examine(workspaces, workspace_id)).troubles == ()
    await workspaces.destroy(workspace_id)
    assert not workspaces.register.path(workspace_id).exists()


@pytest.mark.parametrize(("phase", "layering"), lives(MENDING, copied=["placed"]))
async def test_a_repair_that_is_killed_loses_nothing_and_can_be_repeated(
    python: Path, orchard: Orchard, layering: Layering, phase: str
) -> None:
    workspaces = orchard.workspaces(layering)
    workspace_id = await orchard.ripe(workspaces)
    mine = (await state(workspaces, workspace_id))[1]
    async with workspaces.enter(workspace_id) as sandbox:
        await said(sandbox, "rm -r .venv/bin .venv/lib/python3*/site-packages/apple")
    assert ended(started(python, orchard, layering, workspace_id, "repair", phase)) == -signal.SIGKILL
    assert (await state(workspaces, workspace_id))[1] == mine
    repaired = await orchard.repair(workspaces, workspace_id)
    assert repaired.left == ()
    assert bool(repaired.done) == (phase == "tried")
    async with workspaces.enter(workspace_id) as sandbox:
        await said(sandbox, "python -c 'import pear, apple, tinypkg'")
        assert await own_hash(sandbox) == mine
