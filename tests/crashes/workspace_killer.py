"""Kill a change of workspaces before every call that changes a file: `python workspace_killer.py FOLDER LAYERING DEED`.

Each life is a forked child that makes everything ready, and then dies by SIGKILL just before the n-th such call of
the change itself. The last child is not killed. Prints one JSON object: how many lives there were, and what is wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from tests.crashes.workspace_deeds import DEEDS, Look, leftovers, look, make_snapshot, open_workspaces

from skep.sandbox.erase import erase
from skep.workspace.grounds import Layering

#: What the interpreter announces before it makes such a call; `open` counts when it is for writing.
CHANGES = {
    "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate",
    "os.utime", "os.setxattr", "shutil.rmtree",
}  # fmt: skip


class Reaper:
    """Counts calls once it is armed, and kills this process at the one that it is told."""

    def __init__(self, fatal: int) -> None:
        self.armed = False
        self.count = 0
        self._fatal = fatal
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.armed:
            return
        writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writing:
            self.count += 1
            if self.count == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)


def live(home: Path, layering: Layering, deed: str, fatal: int) -> None:
    """Live one life: prepare, then do the deed up to the fatal call."""
    home.mkdir(mode=0o700)
    make_snapshot(home)
    reaper = Reaper(fatal)
    ready, do = DEEDS[deed]
    workspaces = open_workspaces(home, layering)

    async def life() -> None:
        await ready(workspaces)
        (home / "old.json").write_text(json.dumps(look(home, layering)))
        reaper.armed = True
        await do(workspaces)
        reaper.armed = False

    asyncio.run(life())


def lives(folder: Path, layering: Layering, deed: str) -> Iterator[tuple[int, Path, bool]]:
    """Yield each life by its number, with where it was lived and whether it was killed."""
    for number in range(1, 1000):
        home = folder / f"life-{number}"
        if (child := os.fork()) == 0:
            status = 1
            try:
                live(home, layering, deed, number)
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed and status != 0:
            raise RuntimeError(f"life {number} went wrong by itself")
        yield number, home, killed
        if not killed:
            return


def before(home: Path) -> Look:
    """Return what was there before the deed."""
    return {name: tuple(held) for name, held in json.loads((home / "old.json").read_text()).items()}


def between(old: Look, new: Look, now: Look) -> bool:
    """Tell whether every workspace is as it was before or as it is afterwards."""
    return all(now.get(name) in (old.get(name), new.get(name)) for name in {*old, *new, *now})


def main() -> None:
    folder, layering, deed = Path(sys.argv[1]), cast(Layering, sys.argv[2]), sys.argv[3]
    found: list[tuple[int, Look, Look]] = []
    wrong: list[str] = []
    for number, home, _ in lives(folder, layering, deed):
        old, now = before(home), look(home, layering)
        found.append((number, old, now))
        if left := leftovers(home, layering):
            wrong.append(f"life {number} left {left}")
        if look(home, layering) != now:
            wrong.append(f"life {number}: the sweep changed something")
        if number % 5 == 0:
            asyncio.run(afterwards(home, layering))
        erase(str(home), home.stat().st_ino)
    new = found[-1][2]
    wrong += [f"life {number}: {now}" for number, old, now in found if not between(old, new, now)]
    seen_new = sum(now == new for _, _, now in found)
    sys.stdout.write(json.dumps({"lives": len(found), "wrong": wrong, "new": seen_new, "old": len(found) - seen_new}))


async def afterwards(home: Path, layering: Layering) -> None:
    """Use what is there: nothing that was killed stands in anybody's way."""
    workspaces = open_workspaces(home, layering)
    if not workspaces.list():
        await workspaces.create("hv-one")
    for manifest in workspaces.list():
        await workspaces.checkpoint(manifest.id, "again")
        await workspaces.fork(manifest.id, [f"{manifest.id}-again"])
        await workspaces.destroy(manifest.id)
        await workspaces.destroy(f"{manifest.id}-again")


if __name__ == "__main__":
    main()
