"""What a test holds of a played Daytona: the process that serves it, and the means to make it misbehave."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skep.sandbox.daytona.service import load

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Cloud:
    """A served Daytona."""

    url: str
    key: str = field(repr=False)

    @property
    def options(self) -> dict[str, Any]:
        """The options that lead Skep to it."""
        return {"api_key": self.key, "api_url": f"{self.url}/api", "target": "here"}

    def fail(self, on: str, *, times: int = 1, **how: Any) -> None:
        """Answer the next requests whose `METHOD /path` matches with a failure: `status`, `delay_s`, `drop`."""
        self._play("fail", on=on, times=times, **how)

    def mend(self) -> None:
        self._play("mend")

    def pass_time(self, minutes: float) -> None:
        self._play("pass", minutes=minutes)

    def overrule(self, answers: Mapping[str, Any] | None = None, *, start_s: float = 0.0) -> None:
        """Make machines otherwise than asked, or slowly; without arguments as asked, at once."""
        self._play("overrule", answers=dict(answers or {}), start_s=start_s)

    def destroy(self, machine: str) -> None:
        self._play("destroy", id=machine)

    def cut(self, machine: str) -> None:
        """Cut the connections to a machine that goes on."""
        self._play("cut", id=machine)

    def freeze(self, machine: str) -> None:
        self._play("freeze", id=machine)

    def seen(self) -> list[str]:
        """Every request so far, as `METHOD /path`."""
        seen: list[str] = self._play("seen")
        return seen

    def machines(self) -> dict[str, dict[str, Any]]:
        return {machine["id"]: machine for machine in self._play("machines")}

    def _play(self, act: str, **asked: Any) -> Any:
        head = {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.url}/play/{act}", json.dumps(asked).encode(), head)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@contextmanager
def served() -> Iterator[Cloud]:
    """Serve a Daytona in a process of its own, which ends with this one however it ends."""
    load()  # it takes seconds, which the first test would be blamed for
    key = secrets.token_hex(16)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.clouds.daytona.server", key],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        yield Cloud(server.stdout.readline().strip(), key)
    finally:
        server.stdin.close()
        server.wait(timeout=30)
        server.stdout.close()
