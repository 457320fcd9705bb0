"""Run out of room in the middle of a save or a restore: `python full_disk.py save|restore SMALL LARGE`.

SMALL is a folder with room for 8 MB. Prints one JSON object: the error, what was left half done, and how it went when
there was less to do.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

from skep.errors import SkepError
from skep.workspace.archive.archive import Archive
from skep.workspace.archive.store import open_store

KEY = bytes(32)


def fill(tree: Path, count: int) -> str:
    tree.mkdir()
    for number in range(count):
        (tree / f"file{number}").write_bytes(os.urandom(1 << 20))
    return str(tree)


async def save(small: Path, large: Path) -> dict[str, object]:
    archive = Archive(open_store(str(small / "store")), KEY)
    error = await failure(archive.save("w", [fill(large / "tree", 20)]))
    left = [version.version for version in await archive.list()]
    left += [
        str(path) for name in ("turns", "drafts") for path in (small / "store" / name).rglob("*") if path.is_file()
    ]
    await archive.collect()
    await archive.save("w", [fill(large / "less", 3)])
    await archive.restore("w", large / "back")
    return {**error, "left": left, "afterwards": compare(large / "less", large / "back")}


async def restore(small: Path, large: Path) -> dict[str, object]:
    archive = Archive(open_store(str(large / "store")), KEY)
    await archive.save("w", [fill(large / "tree", 20)])
    error = await failure(archive.restore("w", small / "back"))
    left = [path.name for path in small.iterdir()]
    shutil.rmtree(large / "tree")
    await archive.save("w", [fill(large / "tree", 3)])
    await archive.restore("w", small / "back")
    return {**error, "left": left, "afterwards": compare(large / "tree", small / "back")}


async def failure(act: object) -> dict[str, object]:
    try:
        await act  # type: ignore[misc]
    except SkepError as error:
        return {"error": type(error).__name__, "message": error.message}
    return {"error": None, "message": ""}


def compare(one: Path, other: Path) -> str:
    same = {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }
    return "as it was" if same else "different"


if __name__ == "__main__":
    deed, *folders = sys.argv[1:]
    print(json.dumps(asyncio.run({"save": save, "restore": restore}[deed](*map(Path, folders)))))
