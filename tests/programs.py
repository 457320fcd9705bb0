"""Programs that a test starts, and that do not outlive it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def started(command: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a program for the length of a block, and kill it at the end: without, a failed test waits for it for ever."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
