"""Jupyter's own Python kernel as a rival: on the host, without any sandbox, with its own client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import rivals

_PACKAGES = ("ipykernel==7.4.0", "jupyter_client==8.10.0")

# Reads a cell per line, runs it to the end of its messages, and says how long that took.
_WORKER = """
import json, sys, time
from jupyter_client.manager import start_new_kernel
began = time.perf_counter()
manager, client = start_new_kernel(kernel_name="python3")
print(time.perf_counter() - began, flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    asked = client.execute(json.loads(line))
    while True:
        said = client.get_iopub_msg(timeout=60)
        if said["parent_header"].get("msg_id") == asked and said["content"].get("execution_state") == "idle":
            break
    print(time.perf_counter() - began, flush=True)
manager.shutdown_kernel(now=True)
"""


@dataclass(slots=True)
class Jupyter:
    """A kernel and its client, in a process that measures itself."""

    worker: subprocess.Popen[str]
    start_s: float

    def run(self, code: str) -> float:
        import json

        assert self.worker.stdin is not None and self.worker.stdout is not None
        self.worker.stdin.write(json.dumps(code) + "\n")
        self.worker.stdin.flush()
        return float(self.worker.stdout.readline())


@contextmanager
def jupyter(place: Path, requirements: Path) -> Iterator[Jupyter]:
    if not rivals.may_install:
        raise rivals.NotHere("it is installed for the benchmark only with `--install`")
    python = place / "jupyter" / "bin" / "python"
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", str(place / "jupyter")], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--compile"]
    made = subprocess.run([*pip, "-r", str(requirements), *_PACKAGES], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise rivals.NotHere(f"it cannot be installed: {made.stderr.strip()[-200:]}")
    worker = subprocess.Popen(
        [str(python), "-c", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=place
    )
    try:
        assert worker.stdout is not None
        yield Jupyter(worker, float(worker.stdout.readline()))
    finally:
        worker.communicate()
