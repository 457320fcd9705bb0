"""A disk that fills up, or takes no more writes, under a change of a workspace costs nothing but the change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("workspace_filler.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))}
MOUNT = 'mount -t tmpfs -o size=2m,nr_inodes=400,mode=755 tmpfs "$0" && exec "$@"'
#: To mount takes a namespace in which an ordinary user is root; the program itself is an ordinary user again.
PRIVATE = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
USUAL = [] if os.geteuid() == 0 else ["unshare", "-U", "--map-user=1000", "--map-group=1000"]


def on_a_small_disk(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a mount namespace of its own, where `folder` is a small file system."""
    whole = [*PRIVATE, "sh", "-c", MOUNT, str(folder), *USUAL, *command]
    return subprocess.run(whole, env=ENVIRONMENT, capture_output=True, text=True)


def need_small_disk(folder: Path) -> None:
    reason = "unshare(1) is not installed: apt install util-linux"
    if shutil.which("unshare") is not None:
        probe = on_a_small_disk(folder, "true")
        if probe.returncode == 0:
            return
        reason = f"no private mount can be made (are user namespaces off?): {probe.stderr.strip()}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


CHANGES = ["create", "checkpoint", "rollback", "fork", "clone", "adopt", "compact", "suspend"]
#: What takes another way without layers.
COPYING = ["create", "checkpoint", "rollback", "clone"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("deed", "layering", "kind"),
    [*product(CHANGES, ["overlay"], ["inodes", "pages"]), *product(COPYING, ["copy"], ["pages"])],
)
def test_a_disk_that_fills_at_any_step_is_a_clear_error_and_no_half_state(
    deed: str, layering: str, kind: str, tmp_path: Path
) -> None:
    need_small_disk(tmp_path)
    ran = on_a_small_disk(tmp_path, sys.executable, str(PROGRAM), str(tmp_path), layering, deed, kind)
    assert ran.returncode == 0, ran.stderr
    outcome = json.loads(ran.stdout)
    assert outcome["wrong"] == []
    assert outcome["rounds"] > 0, "the disk was never full"
    assert outcome["errors"] in ([], ["StorageFull"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("deed", ["destroy", "sweep", "forget"])
def test_room_can_be_made_on_a_disk_that_is_full(deed: str, tmp_path: Path) -> None:
    """To remove something takes no room, at most a little to write down that it is gone."""
    need_small_disk(tmp_path)
    ran = on_a_small_disk(tmp_path, sys.executable, str(PROGRAM), str(tmp_path), "overlay", deed, "pages")
    assert ran.returncode == 0, ran.stderr
    outcome = json.loads(ran.stdout)
    assert outcome["wrong"] == []
    assert outcome["rounds"] <= {"destroy": 1, "sweep": 0, "forget": 2}[deed]


@pytest.mark.parametrize(
    ("deed", "layering"),
    [*product([*CHANGES, "destroy", "forget"], ["overlay"]), *product(["create", "checkpoint"], ["copy"])],
)
def test_a_disk_that_takes_no_writes_is_a_clear_error_and_changes_nothing(
    deed: str, layering: str, tmp_path: Path
) -> None:
    need_small_disk(tmp_path)
    if os.geteuid() != 0:
        pytest.skip("only root can remount a disk; for others a folder without its write bit serves")
    ran = on_a_small_disk(tmp_path, sys.executable, str(PROGRAM), str(tmp_path), layering, deed, "writes")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"rounds": 1, "errors": ["Unavailable"], "wrong": []}
