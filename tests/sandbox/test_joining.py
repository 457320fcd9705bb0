"""A sandbox that another process holds, used by a guest: what a guest does in a way of its own.

How commands, terminals and shells run is the same for the holder, with whom all of the contract is tried.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from skep.sandbox.joining import JoinedSandbox, join
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox
from skep.testing import MakeSandbox
from skep.testing.commands import CommandLimitPromises, SignalPromises
from skep.testing.lifecycle import DeathPromises, LifePromises
from skep.testing.tree import FilePromises, HostileFilePromises, WatchPromises
from skep.workspace.door import call

HOLDER = Path(__file__).with_name("holder.py")

#: Promises about pausing and emptying a sandbox as a whole, or that tidy up so: only its holder can keep them.
ONLY_FOR_THE_HOLDER = {
    "test_a_paused_sandbox_does_nothing_until_it_is_resumed",
    "test_pausing_and_resuming_may_be_repeated",
    "test_files_can_be_reached_in_a_paused_sandbox",
    "test_a_paused_sandbox_can_be_stopped",
    "test_a_paused_process_still_runs_out_of_time",
    "test_killing_all_spares_nothing_but_the_sandbox",
    "test_sandboxes_know_nothing_of_each_other",
    "test_commands_start_while_a_program_halts_all_it_sees",
}


@pytest.fixture(scope="module")
def holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a process that holds sandboxes; give the folder of its door."""
    folder = tmp_path_factory.mktemp("holder")
    process = subprocess.Popen([sys.executable, HOLDER, folder], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield folder
    process.kill()
    process.wait()
    process.stdout.close()


async def made(holder: Path, limits: Limits | None = None) -> JoinedSandbox:
    answer = await call(holder, {"act": "make", "limits": asdict(limits) if limits else None})
    return await join(socket.socket(fileno=answer.fds[0]), answer.body)


class TestJoined(
    CommandLimitPromises, SignalPromises, FilePromises, HostileFilePromises, WatchPromises, LifePromises, DeathPromises
):
    @pytest.fixture(autouse=True)
    def _only_what_a_guest_may(self, request: pytest.FixtureRequest) -> None:
        if request.node.originalname in ONLY_FOR_THE_HOLDER:
            pytest.skip("what concerns everybody inside is for the holder, and refused to a guest")

    @pytest.fixture
    def make_sandbox(self, holder: Path) -> MakeSandbox:
        self.holder = holder

        def make(*, limits: Limits | None = None) -> object:
            return made(holder, limits)

        return make  # type: ignore[return-value]

    async def destroy(self, sandbox: Sandbox) -> None:
        await call(self.holder, {"act": "destroy", "id": sandbox.id})
