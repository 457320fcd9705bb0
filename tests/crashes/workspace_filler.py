"""Let a disk fill up at every step of a change: `python workspace_filler.py FOLDER LAYERING DEED inodes|pages|writes`.

FOLDER is a small file system of our own. In each round the change finds room for so many files, or so many pages, and
for one more than in the round before, until it succeeds. Prints one JSON object: how many rounds there were, with
which errors they ended, and what is wrong. With `writes`, the first round finds a disk that takes no writes at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

from tests.crashes.workspace_deeds import DEEDS, Look, Step, leftovers, look, make_snapshot, open_workspaces

from skep.errors import SkepError
from skep.sandbox.erase import erase
from skep.workspace.grounds import Layering
from skep.workspace.workspaces import Workspaces

PAGE = os.sysconf("SC_PAGE_SIZE")
SAID = {"inodes": "no room", "pages": "no room", "writes": "cannot be written"}


class Ballast:
    """Takes all of the room but a little."""

    def __init__(self, folder: Path, kind: str, spare: int) -> None:
        self._folder = folder
        self._kind = kind
        folder.mkdir()
        free = os.statvfs(folder)
        if kind == "writes":
            if spare == 0:
                self._remount("ro")
        elif kind == "pages":
            (folder / "ballast").write_bytes(bytes(max(free.f_bfree - spare, 0) * PAGE))
        else:
            for number in range(max(free.f_ffree - spare, 0)):
                (folder / str(number)).touch()

    def _remount(self, way: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{way}", str(self._folder.parent)], check=True)

    def drop(self) -> None:
        if self._kind == "writes":
            self._remount("rw")
        erase(str(self._folder), self._folder.stat().st_ino)


def carry_out(step: Step, workspaces: Workspaces) -> None:
    async def act() -> None:
        await step(workspaces)

    asyncio.run(act())


def attempt(home: Path, layering: Layering, deed: str, kind: str, spare: int) -> tuple[Look, Look, SkepError | None]:
    """Do the deed with so much room; return what was there before and after it, and how it failed."""
    home.mkdir(mode=0o700)
    make_snapshot(home)
    workspaces = open_workspaces(home, layering)
    ready, do = DEEDS[deed]
    carry_out(ready, workspaces)
    # A folder that is made once and stays is no part of the change.
    for name in ("workspaces", "trees"):
        (home / name).mkdir(mode=0o700, exist_ok=True)
    before = look(home, layering)
    ballast = Ballast(home.with_name("ballast"), kind, spare)
    failed = None
    try:
        carry_out(do, workspaces)
    except SkepError as error:
        failed = error
    finally:
        ballast.drop()
    return before, look(home, layering), failed


def main() -> None:
    folder, layering, deed, kind = Path(sys.argv[1]), cast(Layering, sys.argv[2]), sys.argv[3], sys.argv[4]
    errors: list[str] = []
    wrong: list[str] = []
    for spare in range(400):
        home = folder / "home"
        before, after, failed = attempt(home, layering, deed, kind, spare)
        if failed is not None:
            errors.append(type(failed).__name__)
            if after != before:
                wrong.append(f"with room for {spare}: {before} became {after}")
            if not failed.hint or SAID[kind] not in failed.message:
                wrong.append(f"with room for {spare}: {failed.message!r}, hint {failed.hint!r}")
        if left := leftovers(home, layering):
            wrong.append(f"with room for {spare}: left {left}")
        if failed is not None and spare % 4 == 0:
            retry(home, layering, deed, wrong)
        erase(str(home), home.stat().st_ino)
        if failed is None:
            break
    sys.stdout.write(json.dumps({"rounds": len(errors), "errors": sorted(set(errors)), "wrong": wrong}))


def retry(home: Path, layering: Layering, deed: str, wrong: list[str]) -> None:
    """Once there is room again, the same change succeeds."""
    try:
        carry_out(DEEDS[deed][1], open_workspaces(home, layering))
    except SkepError as error:
        wrong.append(f"with room again: {error.message}")


if __name__ == "__main__":
    main()
