"""The sandbox contract, kept by gVisor: by Debian's build of 2022, without KVM."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

from skep.sandbox.gvisor_house import House
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stream import StreamSandbox
from skep.testing import Gap, MakeSandbox, SandboxContract

pytestmark = pytest.mark.skipif(shutil.which("runsc") is None, reason="no runsc here: sudo apt-get install runsc")


class TestGvisor(SandboxContract):
    gaps: ClassVar[Mapping[str, Gap]] = {}

    @pytest.fixture
    def make_sandbox(self) -> MakeSandbox:
        return partial(Sandbox.create, mechanism="gvisor")

    async def destroy(self, sandbox: Sandbox) -> None:
        """Kill gVisor's kernel, as the host's out-of-memory killer might."""
        assert isinstance(sandbox, StreamSandbox)
        house = sandbox._housing
        assert isinstance(house, House)
        os.kill(_kernel(house), signal.SIGKILL)


def _kernel(house: House) -> int:
    (kernel,) = (pid for pid in house.children() if "runsc-sandbox" in Path(f"/proc/{pid}/cmdline").read_text())
    return kernel
