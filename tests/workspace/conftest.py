"""What every test of workspaces needs: a home with a tiny snapshot in it, made by hand and not built."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from skep.sandbox.erase import erase
from skep.sandbox.layering import layering as machine_layering
from skep.workspace.grounds import Layering
from skep.workspace.snapshot.snapshot import Record, write
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.templates import Templates
from skep.workspace.workspaces import Workspaces

if TYPE_CHECKING:
    from tests.workspace.orchard import Orchard

#: The files of the tiny snapshot.
SNAPSHOT_FILES = {
    ".venv/bin/tool": "#!/bin/sh\necho tool one\n",
    ".venv/lib/python3.11/site-packages/tiny/__init__.py": "VALUE = 1\n",
    ".venv/lib/python3.11/site-packages/tiny-1.0.dist-info/METADATA": "Name: tiny\nVersion: 1.0\n",
    "node_modules/small/package.json": '{"name": "small", "version": "2.0.0"}\n',
    "pyproject.toml": '[project]\nname = "workspace"\nversion = "0"\n',
}

MakeWorkspaces = Callable[..., Workspaces]


def make_snapshot(
    home: Path, template: str = "minimal", *, files: dict[str, str] | None = None, number: int = 1
) -> str:
    """Put a snapshot on the shelf as a build would leave it; return its version."""
    version = f"v{number:04d}-{number:012x}"
    folder = home / "snapshots" / template / version
    for path, text in (files or SNAPSHOT_FILES).items():
        file = folder / "tree" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755 if "/bin/" in path else 0o644)
    size = sum(len(text) for text in (files or SNAPSHOT_FILES).values())
    write(folder, _record(template, version, size, len(files or SNAPSHOT_FILES)))
    latest = folder.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(version)
    return version


def _record(template: str, version: str, size: int, files: int) -> Record:
    return Record(
        template=template,
        version=version,
        hash=version.ljust(64, "0"),
        recipe="",
        python="3.11.2",
        python_packages={"tiny": "1.0"},
        node="20.0.0",
        node_packages={"small": "2.0.0"},
        built_at=datetime(2026, 1, 1, tzinfo=UTC),
        size_bytes=size,
        files=files,
    )


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Give a home with one snapshot of `minimal`."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    make_snapshot(folder)
    yield folder
    erase(str(folder), folder.stat().st_ino)  # the kernel leaves folders there that even their owner may not read


@pytest.fixture
def snapshots(home: Path) -> Snapshots:
    return Snapshots(home, Templates(home / "templates"))


@pytest.fixture(params=["overlay", "copy"])
def layering(request: pytest.FixtureRequest) -> Layering:
    """Run the test once per way in which workspaces are put together."""
    way: Layering = request.param
    if way == "overlay" and machine_layering() == "none":
        if os.environ.get("CI"):
            pytest.fail("this machine refuses overlays, so half of the tests would not run")
        pytest.skip("this machine refuses overlays: see skep doctor")
    return way


@pytest.fixture
def make_workspaces(home: Path, snapshots: Snapshots, layering: Layering) -> MakeWorkspaces:
    """Give a way to open the workspaces of the home, as each process would for itself."""

    def make(**options: Any) -> Workspaces:
        return Workspaces(home, snapshots, **{"layering": layering, **options})

    return make


@pytest.fixture
def workspaces(make_workspaces: MakeWorkspaces) -> Workspaces:
    return make_workspaces()


@pytest.fixture(scope="session")
def orchard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchard]:
    """Give a home with a built snapshot, and a market to install more from, to all who leave the market as it was."""
    from tests.workspace.orchard import growing
    from tests.workspace.workbench import need_node

    need_node()
    with growing(tmp_path_factory.mktemp("orchard")) as made:
        yield made
