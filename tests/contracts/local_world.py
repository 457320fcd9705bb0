"""The sandbox contract on `local`, which isolates nothing. It runs in a world that can be thrown away, or not at all.

The suite halts and kills all that it sees, and writes wherever it can: on a machine that somebody uses that is damage.
`test_local.py` makes the world and runs this module in it.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from skep.sandbox.limits import Limits
from skep.sandbox.local import LocalSandbox, Process
from skep.sandbox.sandbox import Sandbox
from skep.testing import Gap, MakeSandbox, SandboxContract

MARK = "SKEP_DISPOSABLE_WORLD"


def disposable() -> bool:
    """Say whether nothing here can be harmed: a root that nobody writes, processes of its own, no root, no network."""
    marked = os.environ.get(MARK) == "1"
    sealed = bool(os.statvfs("/").f_flag & os.ST_RDONLY) and bool(os.statvfs("/etc").f_flag & os.ST_RDONLY)
    first = Path("/proc/1/comm").read_text().strip()
    networks = [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return marked and sealed and first == "bwrap" and os.getuid() != 0 and networks == ["lo"]


if not disposable():
    pytest.skip("this world cannot be thrown away", allow_module_level=True)

_NO_PLACE = Gap("paths are the machine's own: the workspace is the folder, and there is no /workspace or /cache")
_NO_USER = Gap("commands are the caller's: there is no user `agent`")
_SHARED = Gap("/tmp, /dev/shm and the list of processes are the machine's")
_OPEN = Gap("nothing is read-only: files are removed as the caller could", tried=False)
_ALL = Gap("a program may halt and kill whatever the caller may, the twin and the caller too", tried=False)


class TestLocal(SandboxContract):
    gaps: ClassVar[Mapping[str, Gap]] = {
        "test_commands_start_while_a_program_halts_all_it_sees": _ALL,
        "test_places_that_are_read_only_inside_are_so_here": _OPEN,
        "test_sandboxes_know_nothing_of_each_other": _SHARED,
        "test_dots_do_not_lead_out": _NO_USER,
        "test_the_agent_is_an_ordinary_user_with_a_home": _NO_USER,
        "test_the_environment_is_clean_and_its_own": _NO_USER,
        "test_what_is_written_is_read_back_here_and_inside": _NO_PLACE,
        "test_a_path_means_what_it_means_inside[/workspace/file]": _NO_PLACE,
        "test_a_path_means_what_it_means_inside[/cache/file]": _NO_PLACE,
        "test_shells_of_one_sandbox_are_apart": _NO_PLACE,
        "test_keeps[folder]": _NO_PLACE,
        "test_a_command_works_in_the_workspace_unless_told_otherwise": _NO_PLACE,
        "test_a_list_is_run_as_it_is_and_a_text_by_the_shell": _NO_PLACE,
    }

    @pytest.fixture
    def make_sandbox(self, caplog: pytest.LogCaptureFixture) -> MakeSandbox:
        caplog.set_level(logging.ERROR, "skep.sandbox.local")

        def make(*, limits: Limits | None = None) -> Awaitable[Sandbox]:
            return Sandbox.create(limits=limits, mechanism="local", options={"allow_unsafe": True})

        return make

    async def destroy(self, sandbox: Sandbox) -> None:
        """Kill the twin, as the machine's out-of-memory killer might."""
        assert isinstance(sandbox, LocalSandbox) and isinstance(sandbox._housing, Process)
        guard = sandbox._housing._process.pid
        (twin,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        os.kill(int(twin), signal.SIGKILL)
