"""Start the played E2B beside the tests, point the SDK at it, and break it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clouds.e2b.server import KEY

_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class PlayedCloud:
    """A cloud on loopback, in a process of its own."""

    url: str

    @property
    def options(self) -> dict[str, Any]:
        """What `Sandbox.create(options=…)` takes to use this cloud and no other."""
        return {"api_key": KEY, "api_url": self.url, "sandbox_url": self.url}

    def machines(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("machines")
        return found

    def log(self) -> list[dict[str, Any]]:
        """List the requests to the control plane, oldest first."""
        found: list[dict[str, Any]] = self._ask("log")
        return found

    def break_(self, *faults: dict[str, Any]) -> None:
        """Let these go wrong from now on, in place of what did before; see `server.Fault`."""
        self._ask("faults", list(faults))

    def kill(self, machine_id: str) -> None:
        self._ask(f"kill/{machine_id}")

    def expire(self, machine_id: str) -> None:
        self._ask(f"expire/{machine_id}")

    def _ask(self, what: str, body: object = None) -> Any:
        data = json.dumps(body if body is not None else {}).encode()
        with urllib.request.urlopen(f"{self.url}/_control/{what}", data=data, timeout=10) as answer:
            return json.loads(answer.read() or b"null")


@contextmanager
def played() -> Iterator[PlayedCloud]:
    """Run a cloud for a while."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.clouds.e2b.server"],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        yield PlayedCloud(f"http://127.0.0.1:{int(server.stdout.readline())}")
    finally:
        server.stdin.close()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()
