"""A machine of Daytona as a house for the twin: made ready, reached over a terminal, kept awake, put away.

Of the ways that the toolbox has to talk with a program, a terminal is the one that carries bytes both ways as they
come: a session's input takes a request each time, and its output goes through a file that grows on the machine.
At its other end is a porter, which starts the twin and sends no more than there is room for here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from skep.errors import Conflict, LimitReached, NotFound, SandboxLost, SandboxUnusable, SkepError, Unavailable
from skep.sandbox.binary import native
from skep.sandbox.daytona.porter import LENGTH_BYTES, PARCELS
from skep.sandbox.daytona.service import Machine, Service, Terminal
from skep.sandbox.link import Housing, Link
from skep.sandbox.twin.inside.wire import HEAD

#: Where Skep's own programs lie on a machine.
PLACE = "/opt/skep"
TWIN, FAKEROOT = f"{PLACE}/twin.py", f"{PLACE}/fakeroot.so"
_PORTER = Path(__file__).with_name("porter.py")
#: How Skep's terminals are called, so that those of a controller that has died are known.
_TERMINAL = "skep-"
#: What one line to the porter carries: one message may have 64 KiB.
_ORDER_BYTES = 24 << 10
#: So many parcels are taken before the porter is told; it is told long before it has none left to send.
_TAKEN = PARCELS // 4
#: How much may come before the first parcel, and how many may wait: more shows that the porter is not ours.
_NOISE_BYTES, _PARCELS_LIMIT = 64 << 10, 4 * PARCELS
_READY_S, _LEAVE_S, _LOOK_S = 30.0, 5.0, 1.0
_TRIES, _TRY_AGAIN_S = 4, 0.5

_PREPARE = """\
set -eu
[ "$(id -u)" = 0 ] || exec sudo -n sh "$0" "$@"
command -v python3 >/dev/null || { echo "there is no python3 on it"; exit 1; }
if ! id -u agent >/dev/null 2>&1; then
    if command -v useradd >/dev/null; then useradd -M -U -d /workspace -s /bin/bash agent
    else adduser -D -H -h /workspace agent; fi
fi
mkdir -p /workspace /cache "$2"
chown agent /workspace /cache
chmod 755 "$2"
install -m 755 "$1/twin.py" "$1/porter.py" "$1/fakeroot.so" "$2"
rm -rf "$1"
"""


class Line(Link):
    """A terminal on a machine, as a byte stream."""

    def __init__(self, machine: Machine) -> None:
        self.name = _TERMINAL + secrets.token_hex(8)
        self._machine = machine
        self._terminal: Terminal | None = None
        self._heard = bytearray()
        self._launched = False
        self._parcels: list[bytes] = []
        self._taken = 0
        self._more = asyncio.Event()
        self._over = False
        self._watch: asyncio.Task[None] | None = None
        #: Whether anything was asked of the twin since this was last set to false.
        self.used = True

    @classmethod
    async def open(cls, machine: Machine, *arguments: str) -> Line:
        """Start the twin; the line begins with its first byte."""
        line = cls(machine)
        try:
            line._terminal = await machine.terminal(line.name, line._hear)
            line._watch = asyncio.create_task(line._until_over())
            await line._launch(arguments)
        except BaseException:
            await line.close()
            raise
        return line

    @property
    def is_open(self) -> bool:
        return not self._over

    async def read(self) -> bytes:
        while not self._parcels and not self._over:
            self._more.clear()
            await self._more.wait()
        parcels, self._parcels = self._parcels, []
        self._taken += len(parcels)
        if self._taken >= _TAKEN:
            taken, self._taken = self._taken, 0
            await self._say(b"+%d" % taken)
        return b"".join(parcels)

    async def write(self, data: bytes) -> None:
        self.used = self.used or len(data) > HEAD.size  # a sign of life is asked for by a head alone
        for start in range(0, len(data), _ORDER_BYTES):
            await self._say(base64.urlsafe_b64encode(data[start : start + _ORDER_BYTES]))

    def cut(self) -> None:
        """Count the line as over, whatever still comes."""
        self._over = True
        self._more.set()

    async def close(self) -> None:
        """Hang up, and end the shell: the terminal of a machine outlives whoever was connected to it."""
        self.cut()
        if self._terminal is None:
            return
        terminal, self._terminal = self._terminal, None
        await terminal.hang_up()
        if self._watch is not None:
            self._watch.cancel()
        with contextlib.suppress(SkepError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._machine.close_terminal(self.name)

    async def _say(self, line: bytes) -> None:
        if self._terminal is None or self._over:
            raise SandboxLost("the connection to the machine is gone", hint="start another sandbox")
        await self._terminal.write(line + b"\n")

    async def _hear(self, data: bytes) -> None:
        self._heard += data
        if self._launched:
            self._unpack()
        elif len(self._heard) > _NOISE_BYTES:
            self.cut()
        self._more.set()

    def _unpack(self) -> None:
        """Take the parcels that are whole."""
        at, end = 0, len(self._heard)
        while end - at >= LENGTH_BYTES:
            after = at + LENGTH_BYTES + int.from_bytes(self._heard[at : at + LENGTH_BYTES], "big")
            if after > end:
                break
            self._parcels.append(bytes(memoryview(self._heard)[at + LENGTH_BYTES : after]))
            at = after
        del self._heard[:at]
        if len(self._parcels) > _PARCELS_LIMIT:
            self.cut()

    async def _until_over(self) -> None:
        assert self._terminal is not None
        await self._terminal.ended()
        self.cut()

    async def _launch(self, arguments: tuple[str, ...]) -> None:
        """Have the shell become the porter, and skip what it printed until then."""
        word = secrets.token_hex(16)
        become = '$([ "$(id -u)" = 0 ] || echo sudo -n) python3 -I'
        twin = " ".join((TWIN, *arguments))
        await self._say(f" exec {become} {PLACE}/porter.py {word} /workspace {twin}".encode())
        sign = word[::-1].encode() + b"\n"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_S):
                while sign not in self._heard and not self._over:
                    self._more.clear()
                    await self._more.wait()
        before, found, _ = bytes(self._heard).partition(sign)
        if not found:
            raise _unready(self._machine, before)
        del self._heard[: len(before) + len(sign)]
        self._launched = True
        self._unpack()


def _unready(machine: Machine, said: bytes) -> SandboxUnusable:
    told = said.decode(errors="replace").strip()[-300:]
    return SandboxUnusable(
        f"the twin did not start on machine {machine.id}: {told}",
        hint="use a snapshot or image with Python 3.9 or newer",
    )


async def evict(machine: Machine) -> None:
    """End what another controller left running on a machine."""
    for name in await machine.terminals():
        if name.startswith(_TERMINAL):
            await machine.close_terminal(name)


async def prepare(machine: Machine, twin: bytes) -> None:
    """Bring Skep's programs and the user `agent` onto a machine."""
    parcel = f"/tmp/{_TERMINAL}{secrets.token_hex(8)}"
    programs = {"twin.py": twin, "porter.py": _PORTER.read_bytes(), "prepare.sh": _PREPARE.encode()}
    programs["fakeroot.so"] = native("skep-fakeroot.so").read_bytes()
    await machine.upload({f"{parcel}/{name}": data for name, data in programs.items()})
    code, said = await machine.execute(f"sh {parcel}/prepare.sh {parcel} {PLACE}")
    if code != 0:
        raise SandboxUnusable(
            f"machine {machine.id} cannot be made ready: {said.strip()[-300:]}",
            hint="use a snapshot or image with Python 3, sh, and root or sudo without a password",
        )


class House(Housing):
    """A machine, the service it is had from, and what becomes of it in the end."""

    def __init__(self, service: Service, machine: Machine, *, at_end: Literal["remove", "stop"]) -> None:
        self.id = machine.id
        self.machine = machine
        self.line: Line | None = None
        self.at_end: Literal["remove", "stop", "archive"] = at_end
        self._service = service
        self._ended = False
        self._keeper: asyncio.Task[None] | None = None

    async def alive(self) -> bool:
        """Ask the service. No answer is no reason to give a machine up: the twin's own silence is."""
        if self.line is None or not self.line.is_open:
            return False
        try:
            async with asyncio.timeout(_LOOK_S):
                await self.machine.look()
        except (NotFound, SandboxLost):
            return False
        except (SkepError, TimeoutError):
            return True
        return self.machine.state == "started"

    def keep_awake(self, busy: Callable[[], Awaitable[bool]], *, every_s: float) -> None:
        """Tell the service now and then that the machine is in use, as long as it is: it counts only its own calls."""
        self._keeper = asyncio.create_task(self._keep(busy, every_s))

    async def _keep(self, busy: Callable[[], Awaitable[bool]], every_s: float) -> None:
        while self.line is not None and self.line.is_open:
            await asyncio.sleep(every_s)
            with contextlib.suppress(SkepError):  # the next turn may do better, and a lost machine is told elsewhere
                if self.line.used or await busy():
                    self.line.used = False
                    await self.machine.touch()

    def forgo(self) -> None:
        self.at_end = "remove"

    async def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._keeper is not None:
            self._keeper.cancel()
        try:
            await self._put_away()
        finally:
            await self._service.close()

    async def _put_away(self) -> None:
        """Ask several times: a machine that is forgotten costs money."""
        for attempt in range(1, _TRIES + 1):
            try:
                with contextlib.suppress(SandboxLost, NotFound):  # it is at rest already, or no more
                    await self._settle()
                break
            except (Unavailable, LimitReached, Conflict):
                if attempt == _TRIES:
                    raise
            await asyncio.sleep(_TRY_AGAIN_S * attempt)

    async def _settle(self) -> None:
        if self.at_end == "remove":
            await self.machine.remove()
            return
        await self.machine.look()
        if self.machine.state == "started":
            await self.machine.stop()
        if self.at_end == "archive":
            await self.machine.archive()
