"""A process that dies in the middle of appending loses nothing that it acknowledged."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from skep.state.chain import verify
from skep.state.checkpoint import Signer
from skep.state.database import Database
from skep.state.schema import events

PROGRAM = Path(__file__).with_name("appenders.py")
KILLS = 50

Acknowledged = tuple[str, int, str]


class Appenders:
    """A process that starts appenders, and the pipe on which they report."""

    def __init__(self, url: str, key: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), url, str(key)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def killed_after(self, count: int) -> list[Acknowledged]:
        """Start appenders, kill -9 them after that many acknowledgements, return all that were reported."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        reported: list[Acknowledged] = []
        pid = 0
        for line in self._lines():
            if line[0] == "gone":
                return reported
            if line[0] == "pid":
                pid = int(line[1])
            else:
                reported.append((line[0], int(line[1]), line[2]))
            if pid and len(reported) >= count:
                os.kill(pid, signal.SIGKILL)
                pid = 0
        raise AssertionError("the process that starts appenders has ended")

    def _lines(self) -> Iterator[list[str]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield line.split()

    def close(self) -> None:
        self._process.communicate()


@pytest.mark.timeout(120)
async def test_kill_9_of_16_appenders_50_times_loses_nothing_acknowledged(ready_url: str, tmp_path: Path) -> None:
    """No acknowledged event is missing or altered, no sequence has a gap, the chain verifies.

    What is missing stays missing, and a chain that is broken stays so: to look after every fifth kill is enough.
    """
    signer = Signer.open(tmp_path / "keys" / "events.pem")
    database = await Database.open(ready_url)
    appenders = Appenders(ready_url, tmp_path / "keys" / "events.pem")
    chance = random.Random(2026)
    acknowledged: set[Acknowledged] = set()
    for kill in range(1, KILLS + 1):
        reported = appenders.killed_after(chance.randint(1, 80))
        assert len(reported) == len(set(reported))
        assert not acknowledged & set(reported), "no number is given out twice"
        acknowledged.update(reported)
        if kill % 5 == 0:
            assert acknowledged <= await stored(database)
            verdict = await verify(database, signer=signer)
            assert verdict.ok, verdict.first_bad
            assert verdict.count >= len(acknowledged)
    appenders.close()
    await database.close()


async def stored(database: Database) -> set[Acknowledged]:
    async with database.read() as connection:
        rows = await connection.execute(select(events.c.hive_id, events.c.seq, events.c.hash))
        return {(row.hive_id, row.seq, row.hash.hex()) for row in rows}
