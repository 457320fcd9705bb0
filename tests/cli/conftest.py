"""Run the command line as a person would: in this process for speed, as a program of its own for truth."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skep
from skep.app.logs import stop_logs
from skep.cli.run import run

Ran = subprocess.CompletedProcess[str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's home folder with nothing in it."""
    for name in list(os.environ):
        if name.startswith(("SKEP_", "XDG_")) or name.endswith("_API_KEY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PYTHONPATH", str(Path(skep.__file__).parents[1]))
    return tmp_path


@pytest.fixture
def config(home: Path) -> Path:
    """Where config.json belongs in that home; the folder is there, the file is not."""
    file = home / ".config/skep/config.json"
    file.parent.mkdir(parents=True)
    return file


@pytest.fixture
def cli(home: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Run a command in this process."""

    def invoke(*words: str) -> Ran:
        capfd.readouterr()
        code = run(words)
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(words, code, out, err)

    yield invoke
    stop_logs()


@pytest.fixture(scope="session")
def sown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which there is a hive with a workspace that holds one file; to be copied."""
    home = tmp_path_factory.mktemp("sown")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SKEP_", "XDG_"))}
    source = str(Path(skep.__file__).parents[1])
    subprocess.run([sys.executable, "-c", _SOW], env={**kept, "HOME": str(home), "PYTHONPATH": source}, check=True)
    for folder in home.glob(".local/share/skep/trees/*/work/work"):
        folder.chmod(0o700)  # the kernel leaves it so that not even its owner may copy it
    return home


_SOW = """
from skep.cli.run import run
assert run(["hive", "create", "garden"]) == 0
assert run(["exec", "-H", "garden", "--", "sh", "-c", "echo sown > bed"]) == 0
"""


@pytest.fixture
def garden(cli: Callable[..., Ran], home: Path, sown: Path) -> Callable[..., Ran]:
    """Run a command in a home with the hive `garden`, whose workspace holds the file `bed`."""
    subprocess.run(["cp", "-a", f"{sown}/.", home], check=True)
    return cli


@pytest.fixture
def program(home: Path, warm_scripts: Path) -> Callable[..., Ran]:
    """Run a command as a program of its own; one that is loaded already, unless it is given variables."""

    def invoke(*words: str, **variables: str) -> Ran:
        program = [sys.executable, "-m", "skep"] if variables else [str(warm_scripts / "skep")]
        return subprocess.run(
            [*program, *words],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return invoke
