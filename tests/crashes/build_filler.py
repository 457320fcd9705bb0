"""Build on a small file system that fills up at different points: `python build_filler.py HOME INDEX UPSTREAM`.

Prints one JSON object: for each number of megabytes that were left, what happened.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.workspace.workbench import contents, shelf_names, template

from skep.errors import SkepError
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.snapshot import Snapshot
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.templates import Templates

MB = 1 << 20
#: The package takes 8 MB in the cache, which stay, and 8 MB in the tree.
STEP = 32 << 10
LEFT = (64 << 10, 4 * MB, 10 * MB, 64 << 10, 4 * MB, 8 * MB)


def fill(home: Path, leave_bytes: int) -> Path:
    """Leave so much room and no more."""
    found = os.statvfs(home)
    ballast = home / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(found.f_bavail * found.f_frsize - leave_bytes, 1))
    return ballast


async def attempt(snapshots: Snapshots, home: Path, before: Snapshot, leave_bytes: int) -> dict[str, object]:
    ballast = fill(home, leave_bytes)
    steps: list[str] = []
    kept = contents(before.folder)
    try:
        await snapshots.build("large", on_progress=steps.append)
        ended = "built"
    except SkepError as error:
        ended = type(error).__name__
    finally:
        ballast.unlink()
    whole = contents(before.folder) == kept and snapshots.latest("garden") == before
    names = shelf_names(home, "large") if ended != "built" else set()
    return {"ended": ended, "last": steps[-1] if steps else "", "whole": whole, "left": sorted(names)}


async def main() -> None:
    home, index, upstream = Path(sys.argv[1]), *sys.argv[2:4]
    host, _, address = upstream.partition("=")
    indexes = Indexes(index, None, {host: address})
    snapshots = Snapshots(home, Templates(home / "templates"), indexes=indexes)
    template(home, "garden", python={"dependencies": ["tinypkg"]})
    template(home, "large", python={"dependencies": ["heavy"]})
    before = await snapshots.build("garden")
    outcomes = [await attempt(snapshots, home, before, left) for left in LEFT]
    left = LEFT[-1]
    while outcomes[-1]["ended"] != "built":  # with a little more room each time, to fail in each of the last steps
        left += STEP
        outcomes.append(await attempt(snapshots, home, before, left))
    (data,) = snapshots.latest("large").tree.rglob("data.bin")
    print(json.dumps({"outcomes": outcomes, "size": data.stat().st_size}))


if __name__ == "__main__":
    asyncio.run(main())
