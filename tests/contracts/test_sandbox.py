"""The sandbox contract, kept by bubblewrap."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from skep.sandbox.bubblewrap import BubblewrapSandbox
from skep.sandbox.sandbox import Sandbox
from skep.testing import MakeSandbox, SandboxContract


def kill_first_process(sandbox: Sandbox) -> None:
    """Kill the first process inside, as the host's out-of-memory killer might."""
    assert isinstance(sandbox, BubblewrapSandbox)
    outer = sandbox.launcher.pid
    (inner,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    os.kill(int(inner), signal.SIGKILL)


class TestBubblewrap(SandboxContract):
    @pytest.fixture
    def make_sandbox(self) -> MakeSandbox:
        return Sandbox.create

    async def destroy(self, sandbox: Sandbox) -> None:
        kill_first_process(sandbox)
