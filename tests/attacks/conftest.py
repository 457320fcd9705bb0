"""What every attack needs: a sandbox, and a folder for its control."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.attacks.attack import remove_built

from skep.sandbox.sandbox import Sandbox


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """Give a sandbox with the default limits and a workspace of its own."""
    async with Sandbox.create() as made:
        yield made


@pytest.fixture
def outside() -> Iterator[Path]:
    """Give a folder of the host that no sandbox is shown, though every user could reach it."""
    folder = Path(tempfile.mkdtemp(prefix="skep-outside-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def no_descriptor_is_left() -> Iterator[None]:
    """Check that the test leaves as many descriptors open as it found."""
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    yield
    assert {path.name for path in Path("/proc/self/fd").iterdir()} == before


@pytest.fixture(scope="session", autouse=True)
def _weakened_agents() -> Iterator[None]:
    yield
    remove_built()
