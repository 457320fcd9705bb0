"""A disk that fills up while events are appended costs nothing but the events it had no room for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("filler.py")
MOUNT = 'mount -t tmpfs -o size=4m tmpfs "$1" && exec "$2" "$3" "$1"'


def in_four_megabytes(folder: Path, program: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a mount namespace of its own, where `folder` is a file system of 4 MB."""
    command = ["unshare", "-Urm", "sh", "-c", MOUNT, "sh", str(folder), sys.executable, str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def need_private_mounts(folder: Path) -> None:
    reason = "unshare(1) is not installed: apt install util-linux"
    if shutil.which("unshare") is not None:
        probe = in_four_megabytes(folder, Path(os.devnull))
        if probe.returncode == 0:
            return
        reason = f"no private mount can be made (are user namespaces off?): {probe.stderr.strip()}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def test_a_full_disk_is_a_clear_error_and_appends_work_again_once_there_is_room(tmp_path: Path) -> None:
    need_private_mounts(tmp_path)
    run = in_four_megabytes(tmp_path, PROGRAM)
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout)
    assert outcome["errors"] == ["StorageFull"]
    assert "no room" in outcome["message"]
    assert "space" in outcome["hint"]
    assert outcome["acknowledged"] > 100, "there was room for many before"
    for when in ("full", "after"):
        assert outcome[when]["verifies"]
        assert outcome[when]["missing"] == 0
        assert outcome[when]["integrity"] == "ok"
    assert outcome["after"]["count"] == outcome["acknowledged"]
