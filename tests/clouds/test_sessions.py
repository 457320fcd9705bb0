"""The sessions and commands of hives that want their sandboxes on a cloud: as anywhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.app.lodgings import apiary_of
from tests.clouds import providers
from tests.clouds.providers import Provider
from tests.workspace.conftest import make_snapshot

import skep
from skep.app.choosing import Chooser
from skep.app.program import open_program
from skep.app.reception import open_sessions
from skep.app.residence import THREAD
from skep.config import Paths, Settings
from skep.config.secrets import CloudKeys
from skep.sandbox.erase import erase
from skep.sessions import putting_away


@pytest.fixture(scope="module", params=providers.NAMES)
def cloud(request: pytest.FixtureRequest) -> Iterator[Provider]:
    with providers.run(request.param) as provider:
        yield provider


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    make_snapshot(folder)
    yield folder
    erase(str(folder), folder.stat().st_ino)


async def test_a_session_is_paused_resumed_stopped_archived_and_brought_back(
    home: Path, cloud: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cloud.variables.items():
        monkeypatch.setenv(name, value)
    said = {"sandbox": {"mechanism": cloud.name, "isolation": "machine", cloud.name: cloud.settings}}
    settings = Settings.model_validate(said)
    paths = Paths(config=home / "config.json", home=home, logs=home / "log")
    async with open_program(paths, settings) as program:
        await program.accounts.create("bees")
        hive = await program.hives.create("garden", account_id="bees", actor="test")
        chooser = Chooser(settings, CloudKeys.of(cloud.variables), program=program)
        async with open_sessions(program, chooser=chooser) as sessions:
            computer = await sessions.resolve(hive, THREAD, account_id="bees")
            await computer.run("echo sown > bed; head -1 hive/MEMORY.md")
            (session,) = [live.session for live in sessions.running()]
            (labels,) = cloud.machines().values()
            assert labels.items() >= {"account": "bees", "hive": hive.id, "session": session.id}.items()
            await putting_away.pause(sessions, session.id)
            computer = await sessions.resolve(hive, THREAD, account_id="bees")
            assert (await computer.run("cat bed; echo more >> bed")).text == "sown\n"
            await putting_away.pause(sessions, session.id)
            await putting_away.stop(sessions, session.id)
            assert not cloud.machines()
            computer = await sessions.resolve(hive, THREAD, account_id="bees")
            assert (await computer.run("cat bed; echo most >> bed")).text == "sown\nmore\n"
            await putting_away.archive(sessions, session.id)
            assert not cloud.machines() and not apiary_of(sessions).ids()
            computer = await sessions.resolve(hive, THREAD, account_id="bees")
            assert (await computer.run("cat bed")).text == "sown\nmore\nmost\n"
        assert not cloud.machines()


_COMMANDS = """
from skep.cli.run import run
def must(*words):
    assert run(words) == 0, words
must("hive", "create", "garden")
must("exec", "-H", "garden", "--", "sh", "-c", "echo sown > bed; stat -c %U bed")
must("workspace", "checkpoint", "garden", "--name", "kept")
must("exec", "-H", "garden", "--", "cat", "bed")
must("workspace", "show", "garden")
must("hive", "set", "garden", "sandbox_isolation=namespaces", "sandbox_mechanism=bubblewrap")
must("workspace", "fetch", "garden")
must("workspace", "health", "garden")
"""


def test_a_hive_works_there_by_the_commands_that_work_anywhere(tmp_path: Path, cloud: Provider) -> None:
    config = tmp_path / ".config/skep/config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"sandbox": {"mechanism": cloud.name, cloud.name: cloud.settings}}))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SKEP_", "XDG_"))}
    source = str(Path(skep.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", _COMMANDS],
        env={**kept, **cloud.variables, "HOME": str(tmp_path), "PYTHONPATH": source},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "agent\n" in done.stdout and "\nsown\n" in done.stdout and "its files are here" in done.stdout
    assert not cloud.machines()
