"""The checks of inspect_ai, on sandboxes that a Docker engine holds."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - the checks, which pytest collects here
from tests.docker.daemon import Daemon, daemon

from skep.integrations.inspect_ai import SkepSandboxConfig, SkepSandboxEnvironment

__all__ = ["daemon"]
pytestmark = pytest.mark.service

#: What is not kept, and why.
GAPS = {"test_exec_as_user": "the root of a container is read-only, so that nobody can add users"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(daemon: Daemon) -> AsyncIterator[SkepSandboxEnvironment]:
    made = await SkepSandboxEnvironment.open(SkepSandboxConfig(mechanism="docker", options=daemon.options))
    yield made
    await made.close()


@pytest.fixture
def sandbox_env(shared: SkepSandboxEnvironment, request: pytest.FixtureRequest) -> SkepSandboxEnvironment:
    if request.node.originalname in GAPS:
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=GAPS[request.node.originalname]))
    return shared


def test_the_checks_that_fail_are_named() -> None:
    assert set(GAPS) <= set(self_check.__all__)
    assert (len(self_check.__all__), len(GAPS)) == (44, 1)
