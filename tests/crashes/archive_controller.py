"""A process to be killed while it saves, restores or collects: `python archive_controller.py DEED STORE TREE BACK`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import open_store

KEY = bytes(32)


async def main(deed: str, store: str, tree: str, back: str) -> None:
    archive = Archive(open_store(store), KEY, memory=Path(store).with_name("memory"))
    print("ready", flush=True)
    sys.stdin.readline()
    match deed:
        case "save":
            await archive.save("w", [tree])
        case "restore":
            await archive.restore("w", Path(back))
        case "collect":
            await archive.collect()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
