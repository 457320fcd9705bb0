"""What Skep does with control groups, tried in the guest: each trial is one process, and prints what it found."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skep.errors import SkepError
from skep.sandbox.cgroups import Place
from skep.sandbox.hierarchy import members, own_folder
from skep.sandbox.limits import Limits

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Sandbox

LIMITS = Limits(memory_bytes=48 << 20, processes=40, cpus=0.5, command_s=30)
FORKS = "while (1) { my $p = fork; die qq(fork: $!) unless defined $p; if (!$p) { sleep 100; exit } }"
FILES = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max")


def where() -> dict[str, Any]:
    """Find out where groups can be made, and where this process is before and after."""
    before = own_folder("")
    found = Place.find()
    return {
        "way": found.way,
        "controllers": sorted(found.controllers),
        "before": str(before),
        "after": str(own_folder("")),
        "left": left(),
    }


async def bomb() -> dict[str, Any]:
    """Set off a memory bomb beside a bystander, in whatever holds the limits here."""
    found = where()
    async with sandboxes().create(limits=LIMITS) as sandbox:
        bystander = await sandbox.start(["sleep", "1000"])
        memory = await sandbox.run("tail /dev/zero")
        found |= {"memory": [memory.limit, memory.exit_code], "bystander_ended": bystander.exit is not None}
        found |= {"files": contents(folder(sandbox)), "afterwards": (await sandbox.run("echo still here")).text}
    return found | {"left": left()}


async def limits() -> dict[str, Any]:
    """Run into each limit, and see what is there after the end."""
    found = await bomb()
    async with sandboxes().create(limits=LIMITS) as sandbox:
        group = folder(sandbox)
        assert group is not None
        forks = await sandbox.run(["perl", "-e", FORKS])
        await sandbox.kill_all()
        before = throttled(group)
        spin = await sandbox.run(["timeout", "1", "sh", "-c", "while :; do :; done"])
        found |= {"forks": [forks.limit, forks.exit_code, forks.error_text.strip()], "spin": spin.exit_code}
        found |= {"throttled": throttled(group) - before, "inside": len(members(group))}
    return found | {"folder_left": group.exists(), "left": left()}


async def refused() -> dict[str, Any]:
    """Ask for limits that the kernel refuses."""
    found: dict[str, Any] = {}
    for name, wrong in (("too many", Limits(processes=10**9)), ("no limit", Limits(memory_bytes=-1))):
        try:
            await sandboxes().create(limits=wrong)
        except SkepError as error:
            found[name] = [type(error).__name__, error.message]
    return found | {"left": left()}


async def sharing() -> dict[str, Any]:
    """Look for the place from many threads at once, then from a child process."""
    import asyncio

    places: list[Place] = []
    threads = [threading.Thread(target=lambda: places.append(Place.find())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-B", "-m", "tests.sandbox.guest.trials", "where", stdout=asyncio.subprocess.PIPE
    )
    said, _ = await child.communicate()
    return {"places": sorted({json.dumps(dict(one.parents)) for one in places}), "child": json.loads(said)}


async def hold() -> dict[str, Any]:
    """Keep a sandbox with a detached process until killed."""
    import asyncio

    sandbox = await sandboxes().create(limits=LIMITS)
    await sandbox.run("setsid sleep 1000 > /dev/null 2>&1 & disown")
    print(folder(sandbox), flush=True)
    await asyncio.Event().wait()
    return {}


async def sweep() -> dict[str, Any]:
    """Clean up after controllers that are dead."""
    from skep.sandbox import leftovers

    found = where()
    return found | {"swept": len(leftovers.sweep())}


def sandboxes() -> type[Sandbox]:
    # Late: most trials need no sandbox, and importing takes the guest seconds.
    from skep.sandbox.sandbox import Sandbox

    return Sandbox


def folder(sandbox: Sandbox) -> Path | None:
    from skep.sandbox.bubblewrap import BubblewrapSandbox

    assert isinstance(sandbox, BubblewrapSandbox)
    folders = [Path(path) for path, _ in sandbox.launcher.group.folders.values()]
    return folders[0] if folders else None


def contents(group: Path | None) -> dict[str, str]:
    files = [] if group is None else [group / name for name in FILES]
    return {file.name: file.read_text().strip() for file in files if file.exists()}


def throttled(group: Path) -> int:
    words = (group / "cpu.stat").read_text().split()
    return int(words[words.index("nr_throttled") + 1])


def left() -> list[str]:
    """Return the groups of ours that are there although nothing runs."""
    if (launcher := sys.modules.get("skep.sandbox.launcher")) is not None:
        launcher.spare().drop()
    parents = [Path(parent) for parent in Place.find().parents.values()]
    found = [path.name for parent in parents for path in parent.glob("skep-*")]
    return [name for name in found if name != "skep-controller" and not name.endswith(".scope")]


TRIALS = {trial.__name__: trial for trial in (bomb, limits, refused, sharing, hold, sweep)}


def made(name: str) -> dict[str, Any]:
    """Make a trial and return what it found."""
    if name == "where":
        return where()
    # Late, too: half of what a trial has to load.
    import asyncio

    return asyncio.run(TRIALS[name]())


if __name__ == "__main__":
    print(json.dumps(made(sys.argv[1])))
