"""inspect_ai runs its samples in Skep's sandboxes, and its own checks pass there."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - the checks, which pytest collects here

from skep.integrations.inspect_ai import SkepSandboxConfig, SkepSandboxEnvironment


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared() -> AsyncIterator[SkepSandboxEnvironment]:
    made = await SkepSandboxEnvironment.open(SkepSandboxConfig())
    yield made
    await made.close()


@pytest.fixture
def sandbox_env(shared: SkepSandboxEnvironment) -> SkepSandboxEnvironment:
    return shared
