"""The sandbox contract, kept by containers of a Docker engine."""

from __future__ import annotations

import signal
from functools import partial

import pytest
from tests.docker.daemon import Daemon, daemon

from skep.sandbox.docker import DockerSandbox
from skep.sandbox.sandbox import Sandbox
from skep.testing import MakeSandbox, SandboxContract
from skep.testing.commands import CommandLimitPromises, RunPromises, UserPromises
from skep.testing.lifecycle import DeathPromises, LifePromises
from skep.testing.tree import HostileFilePromises

__all__ = ["daemon"]
pytestmark = pytest.mark.service


class TestDocker(SandboxContract):
    #: Where the engine matters: commands, terminals and shells are the same agent's as without it, where all of the
    #: contract is tried. All of it here: pytest -m 'whole or not whole'
    every_time = (RunPromises, CommandLimitPromises, UserPromises, HostileFilePromises, LifePromises, DeathPromises)

    @pytest.fixture
    def make_sandbox(self, daemon: Daemon) -> MakeSandbox:
        return partial(Sandbox.create, mechanism="docker", options=daemon.options)

    async def destroy(self, sandbox: Sandbox) -> None:
        """Kill the first process inside, as the host's out-of-memory killer might."""
        assert isinstance(sandbox, DockerSandbox)
        signal.pidfd_send_signal(sandbox.container.pidfd, signal.SIGKILL)
