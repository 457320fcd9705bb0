"""The sandbox contract, kept by `local` in a world of its own; see local_world.py for why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from skep.sandbox.binary import Bwrap

ROOT = Path(__file__).parent.parent.parent
WORLD = ROOT / "tests/contracts/local_world.py"


@pytest.fixture(scope="module")
def cases() -> Iterator[list[ElementTree.Element]]:
    """Run the suite in a world where nothing can be harmed, and give what became of each promise."""
    folder = Path(tempfile.mkdtemp(prefix="skep-world-", dir="/tmp"))
    folder.chmod(0o1777)
    try:
        done = _in_world(folder, [sys.executable, "-m", "pytest", str(WORLD), "-q", "-n", "2",
                                  "-p", "no:cacheprovider", "--junitxml", "/tmp/report.xml"])  # fmt: skip
        report = folder / "report.xml"
        assert report.exists(), done.stdout[-5000:] + done.stderr[-5000:]
        yield list(ElementTree.parse(report).iter("testcase"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_world(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    world = [
        sys.executable, str(ROOT / "scripts/as-user"), str(Bwrap.find().path),
        "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run", "--bind", str(folder), "/tmp",
        "--unshare-all", "--die-with-parent", "--new-session", "--clearenv",
        "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "PYTHONDONTWRITEBYTECODE", "1",
        "--setenv", "SKEP_DISPOSABLE_WORLD", "1", "--chdir", str(ROOT), "--",
    ]  # fmt: skip
    return subprocess.run(world + command, capture_output=True, text=True, timeout=900)


@pytest.mark.timeout(900)
def test_the_contract_is_kept_but_for_the_gaps_that_are_listed(cases: list[ElementTree.Element]) -> None:
    broken = [
        f"{case.get('name')}: {fault.get('message')}\n{(fault.text or '')[-1500:]}"
        for case in cases
        for fault in (*case.findall("failure"), *case.findall("error"))
    ]
    assert not broken, "\n\n".join(broken)
    assert len(cases) > 200


def test_the_suite_refuses_to_run_where_it_could_do_harm() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(WORLD), "-q", "-p", "no:cacheprovider"],
        capture_output=True, text=True, timeout=100, cwd=ROOT,
        env={**os.environ, "SKEP_DISPOSABLE_WORLD": "1"},
    )  # fmt: skip
    assert "1 skipped" in done.stdout and "passed" not in done.stdout, done.stdout
