"""How long a command takes before it does anything."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.report import Section

ROUNDS = 30

METHOD = f"""\
Each command runs {ROUNDS} times, in turn with the others, as a process of its own, from its start to its end;
byte code is compiled before. The floor is the interpreter alone. `import skep` must stay under 150 ms and
`skep --version` under 250 ms.
"""


def commands() -> dict[str, list[str]]:
    python = sys.executable
    script = shutil.which("skep", path=str(Path(python).parent))
    return {
        "`python -c pass` (floor)": [python, "-c", "pass"],
        "`python -c 'import skep'`": [python, "-c", "import skep"],
        "`skep --version`": [script, "--version"] if script else [python, "-m", "skep", "--version"],
    }


def measure() -> Section:
    every = commands()
    times_ms: dict[str, list[float]] = {name: [] for name in every}
    for number in range(ROUNDS + 1):
        for name, command in every.items():
            before = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if number:
                times_ms[name].append((time.perf_counter() - before) * 1000)
    floor = statistics.median(times_ms[next(iter(every))])
    return Section(
        name="startup",
        title="Starting",
        method=METHOD,
        columns=["command", "median, ms", "p95, ms", "above the floor, ms"],
        rows=[_row(name, times, floor) for name, times in times_ms.items()],
    )


def _row(name: str, times: list[float], floor: float) -> list[str]:
    median = statistics.median(times)
    return [name, f"{median:.0f}", f"{statistics.quantiles(times, n=20)[-1]:.0f}", f"{median - floor:.0f}"]
