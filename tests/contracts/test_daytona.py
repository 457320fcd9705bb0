"""The sandbox contract, kept on machines of Daytona: its own SDK, and a Daytona that is played on loopback."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from typing import ClassVar

import pytest
from tests.clouds.daytona.cloud import Cloud, served

from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox
from skep.testing import Gap, MakeSandbox, SandboxContract
from skep.testing.commands import RunPromises, StreamPromises
from skep.testing.lifecycle import DeathPromises, LifePromises


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with served() as cloud:
        yield cloud


class TestDaytona(SandboxContract):
    gaps: ClassVar[Mapping[str, Gap]] = {
        "test_a_gigabyte_is_read_and_written_in_pieces": Gap(
            "a terminal gives four kilobytes at a time, so two gigabytes take longer than a promise gets", tried=False
        ),
    }
    #: Where the wire matters: the twin keeps the rest in suites of its own. All of it: pytest -m 'whole or not whole'
    every_time = (RunPromises, StreamPromises, LifePromises, DeathPromises)

    @pytest.fixture
    def make_sandbox(self, cloud: Cloud) -> MakeSandbox:
        def make(*, limits: Limits | None = None) -> Awaitable[Sandbox]:
            return Sandbox.create(limits=limits, mechanism="daytona", options=cloud.options)

        self._cloud = cloud
        return make

    async def destroy(self, sandbox: Sandbox) -> None:
        """Take the machine away, as Daytona does when its host fails."""
        self._cloud.destroy(sandbox.id)
