"""The checks of inspect_ai, on sandboxes that a Docker engine holds."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - the checks, which pytest collects here
from tests.docker.daemon import Daemon, daemon

from skep.integrations.inspect_ai import SkepSandboxConfig, SkepSandboxEnvironment

__all__ = ["daemon"]
pytestmark = pytest.mark.service


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(daemon: Daemon) -> AsyncIterator[SkepSandboxEnvironment]:
    made = await SkepSandboxEnvironment.open(SkepSandboxConfig(mechanism="docker", options=daemon.options))
    yield made
    await made.close()


@pytest.fixture
def sandbox_env(shared: SkepSandboxEnvironment) -> SkepSandboxEnvironment:
    return shared
