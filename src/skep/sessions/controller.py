"""Who runs sandboxes: one process on one host, known by more than its number."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skep.errors import Defect, LeaseLost, SkepError, Unavailable
from skep.state.leases import Lease, Leases

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

#: How long a controller that says nothing is taken to be alive, and in which part of that it says something.
TTL_S = 15.0
_BEAT = 0.25


@dataclass(frozen=True, slots=True)
class Identity:
    """A process for all time: a number may come back, together with its start and its namespace it does not."""

    host: str
    pid: int
    started: int
    namespace: int

    @classmethod
    def of_this_process(cls, host: str) -> Identity:
        started = _started(os.getpid())
        if started is None:
            raise Unavailable("/proc does not show this process", hint="mount /proc where Skep runs")
        return cls(host, os.getpid(), started, Path("/proc/self/ns/pid").stat().st_ino)

    def __str__(self) -> str:
        return f"{self.host}.{self.pid}.{self.started}.{self.namespace}"

    @classmethod
    def parse(cls, text: str) -> Identity | None:
        host, *numbers = text.split(".")
        if len(numbers) != 3 or not all(number.isdigit() for number in numbers):
            return None
        return cls(host, *(int(number) for number in numbers))

    def is_dead(self, here: Identity) -> bool:
        """Say whether the process is known to be gone: only of those that can be seen from here."""
        if (self.host, self.namespace) != (here.host, here.namespace):
            return False
        return _started(self.pid) != self.started


def _started(pid: int) -> int | None:
    """Return when a process began, in ticks since the machine did; None if none by that number runs."""
    try:
        # The second field is the program's name, which may hold spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # One that has ended stays in sight until its parent has asked how.
    return None if fields[0] in "ZX" else int(fields[19])


def owner(controller: str) -> Identity | None:
    """Read from the name of a controller which process it is."""
    _, _, rest = controller.partition(":")
    return Identity.parse(rest.rpartition(":")[0])


class Controller:
    """This process as one that runs sandboxes: a lease that it keeps for as long as it lives."""

    def __init__(self, leases: Leases, identity: Identity, lease: Lease, *, ttl_s: float = TTL_S) -> None:
        self._leases = leases
        self.ttl_s = ttl_s
        self.identity = identity
        self.lease = lease
        #: Set when another process may have taken over what this one held.
        self.lost = asyncio.Event()
        self._renewed = time.monotonic()
        self._beating = asyncio.create_task(self._beat(), name="skep controller")

    @classmethod
    async def start(cls, leases: Leases, host: str, *, ttl_s: float = TTL_S) -> Controller:
        """Announce this process under a name that no other has had."""
        identity = Identity.of_this_process(host)
        name = f"controller:{identity}:{secrets.token_hex(4)}"
        lease = await leases.acquire(name, holder=str(identity), ttl_s=ttl_s)
        if lease is None:
            raise Defect(f"another controller is called {name}")
        return cls(leases, identity, lease, ttl_s=ttl_s)

    @property
    def name(self) -> str:
        return self.lease.name

    async def guard(self, connection: AsyncConnection) -> None:
        """Raise LeaseLost if another may have taken this process for dead; see `Leases.guard`."""
        await self._leases.guard(connection, self.lease)

    def check(self) -> None:
        """Raise Unavailable if others may take this process for dead."""
        if self.lost.is_set() or self._beating.done():
            raise Unavailable("another process has taken over what this one held", hint="start the process anew")
        silent_s = time.monotonic() - self._renewed
        if silent_s > self.ttl_s:
            raise Unavailable(f"others have not heard of this process for {silent_s:.0f} s", hint="see to the database")

    async def stop(self) -> None:
        """Say that this process runs nothing any more."""
        self._beating.cancel()
        await asyncio.wait([self._beating])
        await self._leases.retire(self.lease)  # no other process will have this name

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.ttl_s * _BEAT)
            try:
                self.lease = await self._leases.renew(self.lease, self.ttl_s)
            except LeaseLost:
                self.lost.set()
                return
            except SkepError:
                continue  # a database that is busy, full or away for a moment; the next beat may be in time
            self._renewed = time.monotonic()


def host_name(home: Path) -> str:
    """Return what this host is called: made up once, and kept beside the workspaces that lie on it."""
    path = home / "host"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    home.mkdir(parents=True, exist_ok=True)
    draft = home / f".host-{secrets.token_hex(4)}"
    draft.write_text(f"host-{secrets.token_hex(8)}\n")
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)  # whoever comes second takes the first one's word
    draft.unlink()
    return path.read_text().strip()
