"""Fill a small file system with events, make room, and go on: `python filler.py FOLDER`.

Prints one JSON object: what happened while there was room, when there was none, and afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from sqlalchemy import text

from skep.errors import SkepError
from skep.state.chain import verify
from skep.state.checkpoint import Signer
from skep.state.database import Database
from skep.state.events import Noted
from skep.state.log import EventLog

APPENDERS = 8
BALLAST_BYTES = 1024 * 1024
BODY = "x" * 4000

Mark = tuple[int, str]


async def append_until_full(log: EventLog, acknowledged: list[Mark]) -> SkepError:
    while True:
        try:
            done = await log.append(Noted(text=BODY), hive_id="hv-a", account_id="acme", actor="me")
        except SkepError as error:
            return error
        acknowledged.append((done.seq, done.hash.hex()))


async def state(database: Database, signer: Signer, acknowledged: list[Mark]) -> dict[str, object]:
    verdict = await verify(database, signer=signer)
    async with database.read() as connection:
        rows = await connection.execute(text("SELECT seq, hash FROM skep_events"))
        stored = {(row.seq, row.hash.hex()) for row in rows}
        integrity = (await connection.execute(text("PRAGMA integrity_check"))).scalar_one()
    return {
        "verifies": verdict.ok,
        "missing": len(set(acknowledged) - stored),
        "count": len(stored),
        "integrity": integrity,
    }


async def main(folder: Path) -> None:
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(BALLAST_BYTES))
    database = await Database.open(f"sqlite:///{folder / 'skep.db'}")
    signer = Signer.open(folder / "keys" / "events.pem")
    log = EventLog(database, signer=signer, checkpoint_every=50)
    acknowledged: list[Mark] = []
    errors = await asyncio.gather(*(append_until_full(log, acknowledged) for _ in range(APPENDERS)))
    full = await state(database, signer, acknowledged)
    again = await append_until_full(log, acknowledged)
    ballast.unlink()
    for _ in range(20):
        done = await log.append(Noted(text="room again"), hive_id="hv-a", account_id="acme", actor="me")
        acknowledged.append((done.seq, done.hash.hex()))
    await log.close()
    after = await state(database, signer, acknowledged)
    await database.close()
    errors.append(again)
    outcome = {
        "errors": sorted({type(error).__name__ for error in errors}),
        "message": again.message,
        "hint": again.hint,
        "acknowledged": len(acknowledged),
        "full": full,
        "after": after,
    }
    sys.stdout.write(json.dumps(outcome))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
