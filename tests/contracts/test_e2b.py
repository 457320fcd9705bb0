"""The sandbox contract, kept by E2B: its unmodified SDK against a cloud that is played on loopback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest
from tests.clouds.e2b.cloud import PlayedCloud, played

from skep.sandbox.sandbox import Sandbox
from skep.testing import Gap, MakeSandbox, SandboxContract
from skep.testing.commands import RunPromises, StreamPromises
from skep.testing.lifecycle import DeathPromises, LifePromises


@pytest.fixture(scope="module")
def cloud() -> Iterator[PlayedCloud]:
    with played() as running:
        yield running


_HALTED = "pausing halts the whole machine, so nobody is there to"


class TestE2B(SandboxContract):
    gaps: ClassVar[Mapping[str, Gap]] = {
        "test_a_paused_sandbox_does_nothing_until_it_is_resumed": Gap(f"{_HALTED} say how large a file is"),
        "test_files_can_be_reached_in_a_paused_sandbox": Gap(f"{_HALTED} reach a file"),
        "test_a_gigabyte_is_read_and_written_in_pieces": Gap(
            "the SDK passes text, so two gigabytes take about the minute that a promise gets", tried=False
        ),
        "test_a_paused_process_still_runs_out_of_time": Gap(f"{_HALTED} end a process", tried=False),
    }
    #: Where the wire matters: the twin keeps the rest in suites of its own. All of it: pytest -m 'whole or not whole'
    every_time = (RunPromises, StreamPromises, LifePromises, DeathPromises)

    @pytest.fixture
    def make_sandbox(self, cloud: PlayedCloud) -> MakeSandbox:
        make: Any = partial(Sandbox.create, mechanism="e2b", options=cloud.options, labels={"account": "contract"})
        self._cloud = cloud
        return make  # type: ignore[no-any-return]

    async def destroy(self, sandbox: Sandbox) -> None:
        """End the machine as its provider might, behind the sandbox's back."""
        self._cloud.kill(sandbox.id)
