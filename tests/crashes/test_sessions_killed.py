"""Killed with -9 at any step, a controller leaves a session that the next one finds again, whole and alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.yard import prepare_hive, prepare_home

from skep.sandbox.erase import erase

PROGRAM = Path(__file__).with_name("session_controller.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))}
DEEDS = ["creating", "resuming", "exec", "stopping", "archiving", "unarchiving", "restoring", "deleting"]


@pytest.fixture
def home() -> Iterator[Path]:
    """Give a home in memory where there is one: a hundred lives wait for the disk else."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="skep-sessions-", dir=memory))
    yield prepare_home(folder / "home")
    erase(str(folder), folder.stat().st_ino)


@pytest.fixture
def url(ready_url: str) -> str:
    asyncio.run(prepare_hive(ready_url, threads="thread"))
    return ready_url


def kill(program: list[str]) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, *program], env=ENVIRONMENT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    outcome: dict[str, Any] = json.loads(ran.stdout)
    return outcome


@pytest.mark.timeout(400)
@pytest.mark.parametrize("deeds", [DEEDS[:4], DEEDS[4:]], ids=["running", "put away"])
def test_a_kill_at_any_step_loses_nothing_and_leaves_nothing_behind(home: Path, url: str, deeds: list[str]) -> None:
    """About 30 kills for each half on each database: more than 100 in all."""
    outcome = kill([str(PROGRAM), str(home), url, *deeds])
    assert outcome["wrong"] == []
    assert set(deeds) <= {deed for deed, kills in outcome["kills"].items() if kills >= 3}
    assert sum(outcome["kills"].values()) >= 25


def test_the_inquest_finds_what_is_lost(home: Path, ready_sqlite_url: str) -> None:
    """Control: a life that removes a file, and one that leaves a command running, do not pass."""
    asyncio.run(prepare_hive(ready_sqlite_url, threads="thread"))
    program = f"""
import tests.crashes.session_controller as controller

async def lose(yard, thread):
    await (await yard.resolve(thread)).run("rm changes; echo 7 > log")

controller.DEEDS["losing"] = controller.Deed(controller.nothing, lose, 0.1)
controller.sys.argv = ["controller", {str(home)!r}, {ready_sqlite_url!r}, "losing"]
controller.main()
"""
    wrong = "\n".join(kill(["-c", program])["wrong"])
    assert "found other files: ['/workspace/changes']" in wrong
    assert "found 1 lines" in wrong
