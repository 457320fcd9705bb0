"""The sandbox contract, kept by gVisor as a runtime of a Docker engine."""

from __future__ import annotations

from functools import partial

import pytest
from tests.contracts.test_gvisor import TestGvisor as Alone
from tests.docker.runsc import RunscDaemon, engine

from skep.sandbox.gvisor.engine import Container
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stream import StreamSandbox
from skep.testing import MakeSandbox, SandboxContract
from skep.testing.lifecycle import DeathPromises

__all__ = ["engine"]
pytestmark = pytest.mark.service


class TestGvisorEngine(SandboxContract):
    gaps = Alone.gaps
    #: Where the engine matters most. The rest is as without one, and runs when it is asked for: pytest -m whole
    every_time = (DeathPromises,)

    @pytest.fixture
    def make_sandbox(self, engine: RunscDaemon) -> MakeSandbox:
        return partial(Sandbox.create, mechanism="gvisor", options={"engine": True, "host": engine.host})

    async def destroy(self, sandbox: Sandbox) -> None:
        """Kill the container, as somebody with access to the engine might."""
        assert isinstance(sandbox, StreamSandbox)
        house = sandbox.housing
        assert isinstance(house, Container)
        await house.engine.ask(lambda api: api.kill(house.name))
