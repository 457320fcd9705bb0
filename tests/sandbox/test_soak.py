"""Nothing leaks: after 2,000 commands and 200 sandboxes the host is as it was before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["commands", "sandboxes"])
def test_nothing_is_left(what: str) -> None:
    """No descriptor, process, thread, mount, control group, record or folder is left, and nothing inside.

    In a process of its own: what other tests have left to the garbage collector does not count here, and neither do
    the mounts that they make meanwhile.
    """
    apart = ["unshare", "-m"] if os.geteuid() == 0 and shutil.which("unshare") else []
    words = [*apart, sys.executable, "-W", "error", "-m", "tests.sandbox.soak", what]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
