"""The sandbox contract, kept over a byte stream: the twin runs in a sandbox that stands in for another machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable

import pytest
from tests.sandbox.machines import Machine, start_on_machine

from skep.sandbox.bubblewrap import BubblewrapSandbox
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stream import StreamSandbox
from skep.testing import MakeSandbox, SandboxContract
from skep.testing.commands import StreamPromises
from skep.testing.lifecycle import DeathPromises, LifePromises
from skep.testing.tree import HostileFilePromises


class TestStream(SandboxContract):
    #: `local` keeps nearly all with the same twin. All of it here: pytest -m 'whole or not whole'
    every_time = (StreamPromises, HostileFilePromises, LifePromises, DeathPromises)

    @pytest.fixture
    def make_sandbox(self) -> MakeSandbox:
        def make(*, limits: Limits | None = None) -> Awaitable[Sandbox]:
            return start_on_machine(limits)

        return make

    async def destroy(self, sandbox: Sandbox) -> None:
        """Kill the machine, as an accident would."""
        assert isinstance(sandbox, StreamSandbox)
        machine = sandbox.housing
        assert isinstance(machine, Machine) and isinstance(machine.sandbox, BubblewrapSandbox)
        os.kill(machine.sandbox.launcher.pid, signal.SIGKILL)


class TestArmoured(StreamPromises):
    """The streams again, in lines of text; what is built on them does not know the difference."""

    @pytest.fixture
    def make_sandbox(self) -> MakeSandbox:
        def make(*, limits: Limits | None = None) -> Awaitable[Sandbox]:
            return start_on_machine(limits, "--armour")

        return make


del StreamPromises
