"""A builder to be killed: `python build_controller.py HOME INDEX REGISTRY UPSTREAM TEMPLATE [STEP]`.

It prints each step of the build as it begins, and stops for ever at the beginning of the one that contains STEP.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.templates import Templates


def tell(step: str) -> None:
    print(step, flush=True)
    if len(sys.argv) > 6 and sys.argv[6] in step:
        time.sleep(1000)


async def main() -> None:
    home, index, registry, upstream, name = sys.argv[1:6]
    host, _, address = upstream.partition("=")
    indexes = Indexes(index, registry, {host: address})
    built = await Snapshots(Path(home), Templates(Path(home) / "templates"), indexes=indexes).build(
        name, on_progress=tell
    )
    print(f"done {built.version}", flush=True)


asyncio.run(main())
