"""A worker in a process of its own: python -m tests.crashes.task_worker URL FOLDER HOST.

A task takes two steps. Each says in FOLDER/ledger that it has begun, and the second lasts for as long as FOLDER/hold is
there. In the end, whichever, the ledger has that the worker left the task.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

from skep.state.database import Database
from skep.state.events import Noted
from skep.state.leases import Leases
from skep.state.log import EventLog
from skep.tasks.run import Outcome, Run
from skep.tasks.worker import run_worker

#: How long a worker that says nothing is taken to be alive.
TTL_S = 1.0


async def carry(folder: Path, host: str, run: Run) -> Outcome:
    def say(name: str) -> None:
        with (folder / "ledger").open("a") as ledger:
            ledger.write(f"{name} {run.task.id} {host}\n")

    async def body(name: str) -> str:
        say(name)
        while name == "second" and (folder / "hold").exists():
            await asyncio.sleep(0.01)
        return host

    try:
        for name in ("first", "second"):
            done = await run.step(name, partial(body, name))
            run.note(name, Noted(text=f"{name} by {done}"), numbered=True)
        await run.journal.flush()
    finally:
        say("left")
    return Outcome("succeeded", "done", reply=done)


async def main(url: str, folder: Path, host: str) -> None:
    database = await Database.open(url)
    log = EventLog(database)
    async with run_worker(database, log, Leases(database), host=host, carry=partial(carry, folder, host), ttl_s=TTL_S):
        (folder / f"ready-{host}").write_text(str(os.getpid()))
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
