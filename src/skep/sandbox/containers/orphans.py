"""Whose a container is, by its labels; and those whose controller has died.

A container goes with its controller by itself: the agent inside sees its socket close. What is left for the sweep is a
container that was made and never started, and those of an engine that was down at the time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skep.errors import InvalidRequest, SkepError
from skep.sandbox.containers.engine import Engine

if TYPE_CHECKING:
    from docker import APIClient

_OURS = "skep."
SANDBOX, OWNER = f"{_OURS}sandbox", f"{_OURS}owner"
_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class Orphan:
    """A container whose controller has died."""

    container_id: str
    sandbox_id: str
    #: What its creator said of whose it is.
    labels: Mapping[str, str]


def labels(sandbox_id: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return a container's labels: which sandbox it is, whose, and which process holds it."""
    for name, value in given.items():
        if not name or len(name) + len(value) > _LONGEST or "\0" in name + value:
            raise InvalidRequest(f"a sandbox cannot be labelled {name[:60]!r}", hint="use short, plain text")
    return {f"{_OURS}{name}": value for name, value in given.items()} | {SANDBOX: sandbox_id, OWNER: _identity()}


async def find(engine: Engine) -> list[Orphan]:
    """Return the containers that dead controllers left; nothing is removed."""
    return await engine.ask(_found)


async def sweep(engine: Engine) -> list[str]:
    """Remove the containers that dead controllers left; return the ids of their sandboxes."""
    return await engine.ask(_swept)


def sweep_once(engine: Engine) -> None:
    """Sweep in the background, the first time this process uses an engine; nobody waits for it."""
    key = (os.getpid(), engine.host)
    if key not in _swept_by:
        _swept_by.add(key)
        threading.Thread(target=_sweep_quietly, args=(engine,), name="skep-orphans", daemon=True).start()


_swept_by: set[tuple[int, str]] = set()


def _sweep_quietly(engine: Engine) -> None:
    with contextlib.suppress(SkepError):  # the next process tries again
        engine.ask_now(_swept)


def _swept(api: APIClient) -> list[str]:
    from docker.errors import APIError

    swept = []
    for orphan in _found(api):
        with contextlib.suppress(APIError):  # somebody else removes it
            api.remove_container(orphan.container_id, force=True, v=True)
            swept.append(orphan.sandbox_id)
    return swept


def _found(api: APIClient) -> list[Orphan]:
    ours = api.containers(all=True, filters={"label": [SANDBOX, OWNER]})
    return [_orphan(one["Id"], one["Labels"]) for one in ours if is_orphaned(one["Labels"].get(OWNER, ""))]


def _orphan(container_id: str, told: Mapping[str, str]) -> Orphan:
    given = {name.removeprefix(_OURS): told[name] for name in told if name.startswith(_OURS)}
    return Orphan(container_id, given.pop("sandbox"), {name: given[name] for name in sorted(given) if name != "owner"})


def is_orphaned(owner: str) -> bool:
    """Say whether the process that a label speaks of is certainly dead."""
    boot, namespace, pid, began = [*owner.split(" "), "", "", "", ""][:4]
    if not began or not pid.isdecimal():
        return False
    if boot != _boot():
        return True
    # The numbers of another process namespace mean nothing here.
    return namespace == _namespace() and _start_time(int(pid)) != began


def _identity() -> str:
    return f"{_boot()} {_namespace()} {os.getpid()} {_start_time(os.getpid())}"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _start_time(pid: int) -> str | None:
    """Return when a process began, which tells it from a later one of the same number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
