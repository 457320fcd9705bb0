"""Append events from 16 tasks until killed: `python appenders.py URL KEY`.

For every line on its input this process forks a child that appends; forking is what makes a hundred of them
cheap. The child reports each acknowledged event as `hive seq hash`, one write each, after the call returned.
`pid N` comes before, and `gone` once the child is dead.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import aiosqlite  # noqa: F401 - loaded once, before the forks
import psycopg  # noqa: F401

from skep.state.checkpoint import Signer
from skep.state.database import Database
from skep.state.events import Noted
from skep.state.log import EventLog

APPENDERS = 16
HIVES = 3


async def append_forever(log: EventLog, number: int) -> None:
    hive_id = f"hv-{number % HIVES}"
    while True:
        done = await log.append(Noted(text=f"by {number}"), hive_id=hive_id, account_id="acme", actor=f"a-{number}")
        os.write(1, f"{hive_id} {done.seq} {done.hash.hex()}\n".encode())


async def child(url: str, key: Path) -> None:
    log = EventLog(await Database.open(url, migrate=False), signer=Signer.open(key), checkpoint_every=40)
    async with asyncio.TaskGroup() as group:
        for number in range(APPENDERS):
            group.create_task(append_forever(log, number))


def main(url: str, key: Path) -> None:
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(child(url, key))
            os._exit(1)
        os.write(1, f"pid {pid}\n".encode())
        os.waitpid(pid, 0)
        os.write(1, b"gone\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
