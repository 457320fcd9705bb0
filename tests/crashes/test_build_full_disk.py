"""A disk that fills up while a template is built costs the build and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.workspace.market import HOST, running_market

PROGRAM = Path(__file__).with_name("build_filler.py")
ROOT = Path(__file__).parents[2]
_MOUNT = 'mount -t tmpfs -o size=64m,mode=700 tmpfs "$1" && shift && exec "$@"'
#: An ordinary user is root only for as long as the mount takes.
_BACK = ("unshare", "-U", f"--map-user={os.getuid()}", f"--map-group={os.getgid()}")


def on_a_small_disk(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a mount namespace of its own, where `folder` is a file system of 64 MB."""
    alone = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    back = [] if os.geteuid() == 0 else _BACK
    words = [*alone, "sh", "-c", _MOUNT, "sh", str(folder), *back, *command]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=110, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def test_a_full_disk_at_any_point_is_told_and_leaves_the_old_version(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or on_a_small_disk(tmp_path, "true").returncode != 0:
        reason = "no private mount can be made (are user namespaces off? is unshare(1) missing?)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with running_market() as market:
        upstream = f"{HOST}={market.upstreams[HOST]}"
        run = on_a_small_disk(tmp_path, sys.executable, str(PROGRAM), str(tmp_path), market.python_index, upstream)
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout.splitlines()[-1])
    *ended, last = [one["ended"] for one in outcome["outcomes"]]
    assert set(ended) == {"StorageFull"}, outcome
    assert {one["last"] for one in outcome["outcomes"]} >= {"fetching packages", "installing 1 Python packages"}
    assert (last, outcome["size"]) == ("built", 8 << 20)
    assert all(one["whole"] and one["left"] == [] for one in outcome["outcomes"])
