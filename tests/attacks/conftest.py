"""What every attack needs: a sandbox, and a folder for its control."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.attacks.attack import SECRET, remove_built

from skep.sandbox.sandbox import Sandbox
from skep.sandbox.tree import Tree


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
def folder(tmp_path: Path) -> Path:
    return tmp_path / "workspace"


@pytest.fixture
def secret(outside: Path) -> Path:
    """Give a file of the host that everybody could read and write, so that only the way to it protects it."""
    file = outside / "secret"
    file.write_text(SECRET)
    file.chmod(0o666)
    outside.chmod(0o777)
    return file


@pytest.fixture(params=["live", "at rest"])
async def files(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Tree]:
    """Reach the same workspace through a running sandbox, and without one."""
    if request.param == "at rest":
        tree = Tree.at(str(folder))
        yield tree
        tree.close()
    else:
        async with Sandbox.create(folder) as sandbox:
            assert isinstance(sandbox.files, Tree)
            yield sandbox.files


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
