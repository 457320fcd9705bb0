"""A whole Skep as one process has it: a database, real workspaces over a tiny snapshot, and the sessions of both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.workspace.conftest import make_snapshot

from skep.app.apiary import Apiary
from skep.app.lodgings import Lodgings
from skep.config import Paths, Settings
from skep.sandbox.erase import erase
from skep.sandbox.sandbox import Sandbox
from skep.sessions import putting_away
from skep.sessions.computer import Computer
from skep.sessions.computers import Computers
from skep.sessions.controller import Controller, host_name
from skep.sessions.ledger import Ledger
from skep.sessions.outages import Outages
from skep.sessions.recovery import Pace
from skep.sessions.session import Session
from skep.sessions.sessions import Sessions
from skep.state.accounts import Accounts
from skep.state.database import Database
from skep.state.events import SessionChanged
from skep.state.hives import Hive, Hives
from skep.state.leases import Leases
from skep.state.log import EventLog

ACCOUNT = "bees"
THREAD = "cli:default"

#: Puts something between sessions and their computers.
Wrap = Callable[[Computers], Computers]
MakeLedger = Callable[[Database, EventLog, Controller], Ledger]


def prepare_home(home: Path) -> Path:
    """Make the folder that all processes of one host share."""
    home.mkdir(mode=0o700)
    make_snapshot(home)
    return home


async def prepare_hive(url: str, **upkeep: object) -> None:
    """Put an account and a hive on record."""
    database = await Database.open(url)
    log = EventLog(database)
    try:
        await Accounts(database).create(ACCOUNT)
        hives = Hives(database, log)
        await hives.create("garden", account_id=ACCOUNT, actor="test")
        if upkeep:
            await hives.configure("garden", upkeep, account_id=ACCOUNT, actor="test")
    finally:
        await log.close()
        await database.close()


@dataclass(slots=True)
class Yard:
    """One process's view of it all."""

    home: Path
    database: Database
    log: EventLog
    hive: Hive
    controller: Controller
    apiary: Apiary
    sessions: Sessions

    @property
    def ledger(self) -> Ledger:
        return self.sessions.ledger

    async def resolve(self, thread: str = THREAD, *, recreate: bool = False) -> Computer:
        return await self.sessions.resolve(self.hive, thread, account_id=ACCOUNT, recreate=recreate)

    def id(self, thread: str = THREAD) -> str:
        return self.sessions.wanted(self.hive, thread).id

    async def session(self, thread: str = THREAD) -> Session:
        return await self.ledger.get(self.id(thread))

    async def steps(self, thread: str = THREAD) -> list[tuple[str | None, str]]:
        """Return every change of status on record, the oldest first."""
        recorded = await self.log.page(self.hive.id, types=["session_changed"])
        changes = [one.event for one in recorded if isinstance(one.event, SessionChanged)]
        return [(change.before, change.after) for change in changes if change.session == self.id(thread)]

    async def kill(self, thread: str = THREAD) -> None:
        """Kill all that runs in the sandboxes of the hive, and wait until this process has heard of it."""
        live = self.sessions.live(self.id(thread))
        assert live is not None and signal_inside(self.hive.id, signal.SIGKILL) > 0
        async with asyncio.timeout(30):
            await live.sandbox.gone()

    def workspace(self, thread: str = THREAD) -> Path:
        """Return the folder of a session's workspace on the host."""
        return self.home / "workspaces" / self.id(thread)

    def trees(self, thread: str = THREAD) -> list[Path]:
        """Return the folders that hold its files, the one that is written first."""
        manifest = self.apiary.workspaces.show(self.id(thread))
        every = (manifest.upper, *(tree for tree in sorted(manifest.trees()) if tree != manifest.upper))
        return [self.apiary.workspaces.trees.tree(tree) for tree in every]


@asynccontextmanager
async def open_yard(
    home: Path,
    url: str,
    *,
    host: str | None = None,
    pace: Pace | None = None,
    wrap: Wrap = lambda computers: computers,
    ledger: MakeLedger = Ledger,
    settings: Mapping[str, object] | None = None,
    ttl_s: float | None = None,
) -> AsyncIterator[Yard]:
    """Be a process that runs sessions until the end of the block."""
    database = await Database.open(url)
    log = EventLog(database)
    lasting = {} if ttl_s is None else {"ttl_s": ttl_s}
    controller = await Controller.start(Leases(database), host or host_name(home), **lasting)
    hives = Hives(database, log)
    paths = Paths(config=home / "config.json", home=home, logs=home / "log")
    apiary = Apiary(paths, Settings.model_validate(settings or {}))

    async def find_hive(session: Session) -> Hive:
        return await hives.show(session.hive_id, account_id=session.account_id, deleted=True)

    lodgings = Lodgings(apiary, find_hive)
    book = ledger(database, log, controller)
    sessions = Sessions(book, wrap(lodgings), Outages(database, log, now=book.now), pace=pace)
    lodgings.let_leave(lambda session_id: putting_away.stop(sessions, session_id, reason="another process asked"))
    hive = await hives.show("garden", account_id=ACCOUNT)
    try:
        yield Yard(home, database, log, hive, controller, apiary, sessions)
    finally:
        await putting_away.stop_all(sessions)
        await controller.stop()
        await log.close()
        await database.close()


_PRINT = r"""
import hashlib, json, os, stat
found = {}
for folder, folders, files in os.walk("/workspace"):
    folders[:] = [name for name in sorted(folders) if os.path.join(folder, name) != "/workspace/hive"]
    for name in sorted([*folders, *files]):
        path = os.path.join(folder, name)
        about = os.lstat(path)
        kept = [oct(about.st_mode), about.st_mtime_ns]
        if stat.S_ISLNK(about.st_mode):
            kept.append(os.readlink(path))
        elif stat.S_ISREG(about.st_mode):
            kept.append(hashlib.sha256(open(path, "rb").read()).hexdigest())
        found[path] = kept
print(json.dumps(found))
"""


async def print_of(sandbox: Sandbox) -> dict[str, object]:
    """Return all that a workspace shows from inside: each path with its mode, time, target or content."""
    ran = await sandbox.run(["/usr/bin/python3", "-I", "-S", "-c", _PRINT])
    assert ran.ok, ran.error_text
    found: dict[str, object] = json.loads(ran.text)
    return found


async def seen(computer: Computer) -> dict[str, object]:
    async with computer.sandbox() as sandbox:
        return await print_of(sandbox)


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it, also with what the kernel lets not even its owner read."""
    erase(str(folder), folder.stat().st_ino)


def inside(hive_id: str) -> set[str]:
    """Return the process namespaces of all sandboxes of a hive, whoever runs them."""
    return {place for place, _ in _inside(hive_id)}


def signal_inside(hive_id: str, number: int) -> int:
    """Send a signal to everything that runs in the sandboxes of a hive; return to how many processes."""
    found = list(_inside(hive_id))
    for _, pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(found)


def _inside(hive_id: str) -> Iterator[tuple[str, int]]:
    """Yield the processes in sandboxes of a hive, known by the folder of it that each sandbox shows."""
    shown: dict[str, bool] = {}  # by the namespace of mounts: most processes share one
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                sight = str((process / "ns" / "mnt").readlink())
                if sight not in shown:
                    shown[sight] = f"/hives/{hive_id} " in (process / "mountinfo").read_text()
                place = str((process / "ns" / "pid").readlink())
            except OSError:
                continue  # it has just ended, or is another user's
            if shown[sight]:
                yield place, int(process.name)
