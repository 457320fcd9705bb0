"""Each tool does the same whatever holds the sandbox. Docker is tried every time, all when `-m` speaks of the whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.agent.rounds import check, go_round
from tests.clouds import providers
from tests.contracts.world import world
from tests.docker.daemon import Daemon, daemon
from tests.sessions.yard import prepare_home, remove

from skep.sandbox.mechanisms import usable

__all__ = ["daemon"]


@pytest.fixture
def whole(pytestconfig: pytest.Config) -> None:
    if "whole" not in pytestconfig.option.markexpr:
        pytest.skip("takes several seconds: pytest -m 'whole or not whole'")


@pytest.fixture
def home(tmp_path: Path, ready_sqlite: Path) -> Iterator[Path]:
    home = prepare_home(tmp_path / "home")
    shutil.copy(ready_sqlite, home / "skep.db")
    yield home
    remove(home)


@pytest.mark.service
async def test_every_tool_works_in_a_container(home: Path, daemon: Daemon) -> None:
    check(await go_round(home, {"mechanism": "docker", "docker": {"host": daemon.host}}))


@pytest.mark.whole
@pytest.mark.skipif(not usable("gvisor").usable, reason="no runsc here: sudo apt-get install runsc")
async def test_every_tool_works_over_another_kernel(home: Path, whole: None) -> None:
    check(await go_round(home, {"mechanism": "gvisor"}))


@pytest.mark.whole
@pytest.mark.parametrize("name", providers.NAMES)
async def test_every_tool_works_on_a_cloud(name: str, home: Path, whole: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with providers.run(name) as cloud:
        for variable, value in cloud.variables.items():
            monkeypatch.setenv(variable, value)
        sandbox = {"mechanism": name, "isolation": "machine", name: cloud.settings}
        check(await go_round(home, sandbox, variables=cloud.variables))


@pytest.mark.whole
def test_every_tool_works_without_isolation(whole: None) -> None:
    sandbox = json.dumps({"mechanism": "local", "isolation": "none", "allow_unsafe": True})
    with world() as (_, enter):
        command = [*enter, sys.executable, "-m", "tests.agent.rounds", "/tmp/home", sandbox]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
