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

from skep.sandbox.gvisor.house import House
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stream import StreamSandbox
from skep.testing import Gap, MakeSandbox, SandboxContract
from skep.testing.commands import RunPromises, SignalPromises, UserPromises
from skep.testing.terminals import TerminalPromises

pytestmark = pytest.mark.skipif(
    shutil.which("runsc") is None and not os.environ.get("CI"), reason="there is no runsc: sudo apt-get install runsc"
)


_BYTES_ONLY = "a terminal of gVisor's carries bytes, and takes none of them for a key"


class TestGvisor(SandboxContract):
    gaps: ClassVar[Mapping[str, Gap]] = {
        "test_control_c_interrupts_what_runs_in_front": Gap(_BYTES_ONLY, tried=False),
        "test_the_end_of_input_is_typed": Gap(_BYTES_ONLY, tried=False),
        "test_an_interactive_shell_has_job_control": Gap(_BYTES_ONLY, tried=False),
        "test_the_erase_key_takes_back_a_whole_character": Gap(_BYTES_ONLY),
    }
    #: A sandbox takes most of a second to start here. The rest runs when it is asked for: pytest -m whole
    every_time = (RunPromises, SignalPromises, UserPromises, TerminalPromises)

    @pytest.fixture
    def make_sandbox(self) -> MakeSandbox:
        return partial(Sandbox.create, mechanism="gvisor")

    async def destroy(self, sandbox: Sandbox) -> None:
        """Kill gVisor's kernel, as the host's out-of-memory killer might."""
        assert isinstance(sandbox, StreamSandbox)
        house = sandbox.housing
        assert isinstance(house, House)
        os.kill(_kernel(house), signal.SIGKILL)


def _kernel(house: House) -> int:
    (kernel,) = (pid for pid in house.children() if "runsc-sandbox" in Path(f"/proc/{pid}/cmdline").read_text())
    return kernel
