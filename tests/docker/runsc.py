"""A Docker engine of the tests' own that knows gVisor's runsc as a runtime."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docker.daemon import Daemon, require_docker

_RUNSC = shutil.which("runsc", path="/usr/local/bin:/usr/bin")


class RunscDaemon(Daemon):
    """An engine that knows runsc."""

    def _arguments(self) -> list[str]:
        runtime = {"path": _RUNSC, "runtimeArgs": ["--network=none"]}
        (self.folder / "daemon.json").write_text(json.dumps({"runtimes": {"runsc": runtime}}))
        return [f"--config-file={self.folder}/daemon.json", *super()._arguments()]


@pytest.fixture(scope="module")
def engine() -> Iterator[RunscDaemon]:
    """Give an engine that knows runsc, to the tests of one module."""
    require_docker()
    if _RUNSC is None:
        reason = "there is no runsc: sudo apt-get install runsc"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    daemon = RunscDaemon(Path(tempfile.mkdtemp(prefix="skep-gv-", dir="/tmp")))
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.remove()
