"""How fast code cells run, beside a bare Python that does the same on the host."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench import rivals
from bench.contest import Contender, compete
from bench.jupyter import Jupyter, jupyter
from bench.report import Section
from skep.sandbox.interpreter import Interpreter
from skep.sandbox.pool import InterpreterPool
from skep.sandbox.sandbox import Sandbox

CELLS, FIRST, RATES = 400, 15, 5
MB = 1_000_000
PRINTED_MB = 200
TESTS = Path(__file__).parent.parent / "tests"
PYTHON = "/opt/env/bin/python"

PREPARE = (
    "import numpy as np, pandas as pd\ndf = pd.DataFrame({'k': list('abcd') * 500, 'x': np.arange(2000.0)})\nx = 1"
)
WARM = {
    "warm cell, `x + 1`": "x + 1",
    "warm pandas cell, `df.x.sum()`": "df.x.sum()",
    "warm pandas cell that groups, `df.groupby('k').x.mean()`": "df.groupby('k').x.mean()",
    "warm pandas cell that shows a frame, `df.head()`": "df.head()",
}
FIRST_CELL = "import numpy as np, pandas as pd\nint(pd.Series(np.arange(10)).sum())"
PRINT = f"for _ in range({PRINTED_MB}): print('x' * 999_999)"

METHOD = f"""\
The contenders take turns: {CELLS} warm cells each, {FIRST} first cells, {RATES} rounds of printing. "bare" is a Python
process on the host that reads code from a pipe, evaluates it and writes back the value's text: the floor. Jupyter is
its kernel and client on the host, without a sandbox, over TCP on loopback. Skep's cells are whole ones: sent into the
sandbox, run, their output drained, the value brought back in all its formats (a frame as text, HTML and records, which
the others do not all make). The first cell counts from before the sandbox is made to the answer, for the pool from
before it is taken; its floor is a fresh Python on the host, to its end. All use the same interpreter and packages.
"""

# Reads one cell per line, writes one line back.
_BARE = """
import ast, json, sys
space = {}
for line in sys.stdin:
    tree = ast.parse(json.loads(line))
    last = tree.body.pop().value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), space)
    value = repr(eval(compile(ast.Expression(last), "cell", "eval"), space)) if last else None
    print(json.dumps(value), flush=True)
"""

Row = list[str]


def measure() -> Section:
    science = subprocess.run(
        [sys.executable, str(TESTS / "science_environment.py")], capture_output=True, text=True, check=True
    ).stdout.strip()
    with ExitStack() as at_end:
        place = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="skep-bench-")))
        rival, absent = _rival(at_end, place)
        bare = at_end.enter_context(_bare(f"{science}/bin/python"))
        rows, notes = asyncio.run(_measure(science, bare, rival))
    return Section(
        name="interpreter",
        title="Code cells",
        method=METHOD,
        columns=["what", "who", "median", "p95", "goal"],
        rows=rows,
        notes=" ".join([*notes, *([f"Jupyter was not measured: {absent}."] if absent else [])]),
    )


async def _measure(science: str, bare: Callable[[str], float], rival: Jupyter | None) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    async with Sandbox.create(read_only={science: "/opt/env"}) as sandbox:
        interpreter = Interpreter(sandbox, python=PYTHON)
        await interpreter.run(PREPARE)
        bare(PREPARE)
        if rival is not None:
            rival.run(PREPARE)
        for (what, code), goal in zip(WARM.items(), ("<= 1 ms", "<= 3 ms", "<= 3 ms", "<= 3 ms"), strict=True):
            rows += await _warm(what, code, goal, interpreter, bare, rival)
        rows += await _printing(interpreter, f"{science}/bin/python")
    first, memory = await _first(science)
    return [*rows, *first], [memory]


async def _warm(
    what: str, code: str, goal: str, interpreter: Interpreter, bare: Callable[[str], float], rival: Jupyter | None
) -> list[Row]:
    async def skep() -> float:
        began = time.perf_counter()
        cell = await interpreter.run(code)
        assert cell.value is not None, cell
        return time.perf_counter() - began

    contenders = [Contender("bare (floor)", _outside(lambda: bare(code)), CELLS), Contender("**Skep**", skep, CELLS)]
    if rival is not None:
        contenders.append(Contender("Jupyter", _outside(lambda: rival.run(code)), CELLS))
    await compete(contenders)
    return [[what, one.name, _ms(one.median), _ms(one.p95), goal if "Skep" in one.name else ""] for one in contenders]


async def _first(science: str) -> tuple[list[Row], str]:
    async def make() -> Sandbox:
        return await Sandbox.create(read_only={science: "/opt/env"})

    async def cold() -> float:
        began = time.perf_counter()
        async with await make() as sandbox, Interpreter(sandbox, python=PYTHON) as interpreter:
            assert (await interpreter.run(FIRST_CELL)).text == "45"
            return time.perf_counter() - began

    used: list[float] = []
    async with InterpreterPool(make, python=PYTHON) as pool:

        async def pooled() -> float:
            await pool.fill()
            began = time.perf_counter()
            async with await pool.take() as interpreter:
                assert (await interpreter.run(FIRST_CELL)).text == "45"
                took = time.perf_counter() - began
                used.append(float((await interpreter.run(_MEMORY)).text))
            return took

        outside = [f"{science}/bin/python", "-c", FIRST_CELL]
        contenders = [
            Contender("fresh Python outside (floor)", _outside(lambda: _timed(outside)), FIRST),
            Contender("**Skep**, nothing made ahead", cold, FIRST),
            Contender("**Skep**, from a pool of one", pooled, FIRST),
        ]
        await compete(contenders, gap_s=0.02)
    what = "first cell with numpy and pandas, from create"
    goals = ("", "", "<= 60 ms")
    rows = [[what, one.name, _ms(one.median), _ms(one.p95), goal] for one, goal in zip(contenders, goals, strict=True)]
    return rows, f"An interpreter that waits in the pool holds {max(used):.0f} MB (PSS of its kernel)."


_MEMORY = "import re\nint(re.search(r'^Pss:\\s+(\\d+)', open('/proc/self/smaps_rollup').read(), re.M)[1]) / 1000"


async def _printing(interpreter: Interpreter, python: str) -> list[Row]:
    async def skep() -> float:
        began = time.perf_counter()
        cell = await interpreter.run(PRINT, timeout_s=100)
        assert cell.ok and cell.truncated, cell.outcome
        return PRINTED_MB / (time.perf_counter() - began)

    def outside() -> float:
        began = time.perf_counter()
        with subprocess.Popen([python, "-c", PRINT], stdout=subprocess.PIPE) as printing:
            assert printing.stdout is not None
            while os.read(printing.stdout.fileno(), 1 << 20):
                pass
        return PRINTED_MB / (time.perf_counter() - began)

    contenders = [Contender("piped outside (floor)", _outside(outside), RATES), Contender("**Skep**", skep, RATES)]
    await compete(contenders)
    what = f"printing {PRINTED_MB} MB"
    return [[what, one.name, f"{one.median:.0f} MB/s", f"least {one.least:.0f} MB/s", ""] for one in contenders]


def _rival(at_end: ExitStack, place: Path) -> tuple[Jupyter | None, str]:
    try:
        return at_end.enter_context(jupyter(place, TESTS / "science-requirements.txt")), ""
    except rivals.NotHere as reason:
        return None, str(reason)


@contextmanager
def _bare(python: str) -> Iterator[Callable[[str], float]]:
    worker = subprocess.Popen([python, "-c", _BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdin is not None and worker.stdout is not None
    read, write = worker.stdout, worker.stdin

    def run(code: str) -> float:
        began = time.perf_counter()
        write.write(json.dumps(code) + "\n")
        write.flush()
        read.readline()
        return time.perf_counter() - began

    yield run
    worker.communicate()


def _timed(argv: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _outside(act: Callable[[], float]) -> Callable[[], asyncio.Future[float]]:
    """Let something that waits be one of the contenders; nothing else runs meanwhile."""

    def once() -> asyncio.Future[float]:
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        done.set_result(act())
        return done

    return once


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
