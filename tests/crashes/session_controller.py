"""Kill controllers of sessions at every step that they take: `python session_controller.py HOME URL [DEED…]`.

Each life is a forked child, a controller like any other. It first brings back what the life before it was killed over,
and tells what it finds; then it does a deed and dies by SIGKILL, at the n-th step of it that touches the record or a
computer, or at a random moment. Prints one JSON object: how many lives were cut short, and all that was wrong.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.sessions.yard import Yard, inside, open_yard, print_of

from skep.sandbox.leftovers import records_folder, sweep
from skep.sandbox.sandbox import Sandbox
from skep.sessions import putting_away
from skep.sessions.computer import Computer
from skep.sessions.computers import Computers, Condition, Held, Mended
from skep.sessions.ledger import Ledger
from skep.sessions.session import Session, Status
from skep.workspace.packages.packages import Installed

#: How long what a dead controller ran may take to end, and how long anything else may take.
GONE_S = 2.0
LIFE_S = 60.0
RANDOM_KILLS = 4
#: Grows by itself while a command runs.
LOG = "/workspace/log"
WRITER = "n=$(wc -l < log); while :; do n=$((n+1)); echo $n >> log; echo $n; done"

Seen = dict[str, Any]


class Steps:
    """Counts the steps of a deed once it is armed, and ends this process at the fatal one."""

    def __init__(self, fatal: int) -> None:
        self.armed = False
        self._fatal = fatal
        self._count = 0

    def __call__(self) -> None:
        self._count += self.armed
        if self.armed and self._count == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    async def around(self, act: Awaitable[Any]) -> Any:
        self()
        done = await act
        self()
        return done


class SteppedHeld:
    """A workspace in hand, with a step before and after each act."""

    def __init__(self, held: Held, steps: Steps) -> None:
        self._held = held
        self._steps = steps

    async def sandbox(self) -> Sandbox:
        sandbox: Sandbox = await self._steps.around(self._held.sandbox())
        return sandbox

    async def stop(self) -> None:
        await self._steps.around(self._held.stop())

    async def leave(self) -> None:
        await self._steps.around(self._held.leave())


class SteppedComputers:
    """Real computers, with a step before and after each act."""

    def __init__(self, computers: Computers, steps: Steps) -> None:
        self._computers = computers
        self._steps = steps

    async def condition(self, session: Session) -> Condition:
        return await self._computers.condition(session)

    async def make(self, session: Session) -> None:
        await self._steps.around(self._computers.make(session))

    @asynccontextmanager
    async def hold(self, session: Session) -> AsyncIterator[Held]:
        self._steps()
        async with self._computers.hold(session) as held:
            self._steps()
            yield SteppedHeld(held, self._steps)
        self._steps()

    @asynccontextmanager
    async def join(self, session: Session) -> AsyncIterator[Sandbox]:
        async with self._computers.join(session) as sandbox:
            yield sandbox

    async def hand_over(self, session: Session) -> None:
        await self._computers.hand_over(session)

    async def install(self, session: Session, *, python: Sequence[str], node: Sequence[str]) -> Installed:
        return await self._computers.install(session, python=python, node=node)

    async def mend(self, session: Session) -> Mended:
        return await self._computers.mend(session)

    async def save(self, session: Session) -> str:
        saved: str = await self._steps.around(self._computers.save(session))
        return saved

    async def free(self, session: Session) -> None:
        await self._steps.around(self._computers.free(session))

    async def unarchive(self, session: Session, archive: str) -> None:
        await self._steps.around(self._computers.unarchive(session, archive))

    async def destroy(self, session: Session) -> None:
        await self._steps.around(self._computers.destroy(session))


class SteppedLedger(Ledger):
    """A real ledger, with a step before and after each time it is written."""

    steps: Steps

    async def claim(self, wanted: Session, *, reason: str) -> Session | None:
        claimed: Session | None = await self.steps.around(super().claim(wanted, reason=reason))
        return claimed

    async def change(self, session: Session, to: Status, *, reason: str, **changes: Any) -> Session:
        changed: Session = await self.steps.around(super().change(session, to, reason=reason, **changes))
        return changed

    async def note(self, session: Session, **changes: Any) -> Session:
        noted: Session = await self.steps.around(super().note(session, **changes))
        return noted


async def create(yard: Yard, thread: str) -> None:
    await yard.resolve(thread)


async def stop(yard: Yard, thread: str) -> None:
    await putting_away.stop(yard.sessions, yard.id(thread))


async def archive(yard: Yard, thread: str) -> None:
    await putting_away.archive(yard.sessions, yard.id(thread))


async def restore(yard: Yard, thread: str) -> None:
    await putting_away.restore(yard.sessions, yard.id(thread))


async def delete(yard: Yard, thread: str) -> None:
    await putting_away.delete(yard.sessions, yard.id(thread))


async def write_for_ever(yard: Yard, thread: str) -> None:
    computer = await yard.resolve(thread)
    process = await computer.start(WRITER)
    async for chunk in process.stdout:
        say(written=int(chunk.split()[-1]))


async def nothing(_: Yard, __: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Deed:
    """What is done before the steps count, what is done while they do, and how long that takes at most, about."""

    ready: Callable[[Yard, str], Awaitable[None]]
    do: Callable[[Yard, str], Awaitable[None]]
    about_s: float


DEEDS = {
    "creating": Deed(nothing, create, 0.2),
    "resuming": Deed(stop, create, 0.1),
    "exec": Deed(nothing, write_for_ever, 0.15),
    "stopping": Deed(nothing, stop, 0.05),
    "archiving": Deed(nothing, archive, 0.15),
    "unarchiving": Deed(archive, create, 0.12),
    "restoring": Deed(archive, restore, 0.1),
    "deleting": Deed(nothing, delete, 0.08),
}


def say(**words: object) -> None:
    os.write(ears[0], json.dumps(words).encode() + b"\n")


ears: list[int] = []


async def furnish(computer: Computer, number: int) -> None:
    """Leave something of every kind in the workspace."""
    ran = await computer.run(
        f"mkdir -m 750 d{number} && head -c 5000 /dev/urandom > d{number}/bytes && chmod 640 d{number}/bytes && "
        f"ln -s ../nowhere d{number}/link && rm -rf node_modules && echo {number} > changes && : >> log && "
        f"touch -h -d @{number}.123456789 d{number}/link d{number}"
    )
    assert ran.ok, ran.error_text


async def look(yard: Yard, thread: str) -> None:
    """Bring a session back, and tell what is found."""
    before = await yard.ledger.find(yard.id(thread))
    computer = await yard.resolve(thread)
    late = len(inside(yard.hive.id)) - 1
    alone = late == 0 or await asyncio.to_thread(eventually, lambda: len(inside(yard.hive.id)) == 1, GONE_S)
    async with computer.sandbox() as sandbox:
        log = (await sandbox.run("cat log 2> /dev/null")).stdout
        files = await print_of(sandbox)
        entry: Any = files.pop(LOG, None)
        say(
            status=before.status if before else None,
            late=late,
            alone=alone,
            seen=files,
            log=log.decode(),
            grows=entry is not None and entry[-1] != hashlib.sha256(log).hexdigest(),
            sandbox=sandbox.id,
            hive=yard.hive.id,
            workspaces=yard.apiary.ids(),
            id=yard.id(thread),
        )


async def live(home: Path, url: str, life: Life) -> None:
    """Be a controller, and never come to an orderly end."""
    steps = Steps(life.fatal)
    SteppedLedger.steps = steps
    async with open_yard(home, url, wrap=lambda real: SteppedComputers(real, steps), ledger=SteppedLedger) as yard:
        await look(yard, life.behind)
        if life.deed is not None:
            await do(DEEDS[life.deed], yard, life, steps)
        else:
            say(chain=await yard.steps(life.thread))
        os.kill(os.getpid(), signal.SIGKILL)


async def do(deed: Deed, yard: Yard, life: Life, steps: Steps) -> None:
    if life.deed != "creating":
        computer = await yard.resolve(life.thread)
        await furnish(computer, life.number)
        async with computer.sandbox() as sandbox:
            files = await print_of(sandbox)
        files.pop(LOG)
        say(before=files)
    await deed.ready(yard, life.thread)
    say(armed=True)
    steps.armed = True
    await deed.do(yard, life.thread)
    say(done=True)


@dataclass(slots=True)
class Life:
    """One controller: whose work it finds, what it does, when it dies, and all that it said."""

    number: int
    behind: str
    deed: str | None
    thread: str
    fatal: int = 0
    after_s: float | None = None
    said: Seen = field(default_factory=dict)

    def run(self, home: Path, url: str) -> None:
        """Live it in a child, to the end by SIGKILL."""
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            ears[:] = [writing]
            try:
                asyncio.run(self._alone(home, url))
            finally:
                traceback.print_exc()
                os._exit(1)
        os.close(writing)
        self._listen(reading, child)
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            raise RuntimeError(f"life {self.number} went wrong by itself: {self}")

    async def _alone(self, home: Path, url: str) -> None:
        async with asyncio.timeout(LIFE_S):
            await live(home, url, self)

    def _listen(self, reading: int, child: int) -> None:
        deadline: float | None = None
        text = b""
        while True:
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([reading], [], [], wait_s)[0]:
                os.kill(child, signal.SIGKILL)
                deadline = None
                continue
            if not (chunk := os.read(reading, 1 << 16)):
                break
            text += chunk
            *lines, text = text.split(b"\n")
            for line in lines:
                self.said |= json.loads(line)
            if deadline is None and self.after_s is not None and "armed" in self.said:
                deadline, self.after_s = time.monotonic() + self.after_s, None
        os.close(reading)


def lives(deeds: list[str]) -> Iterator[Life]:
    """Plan the lives: each deed at every step of it, as long as there is one more, and at random moments."""
    chance = random.Random(2026)
    behind = "cli:fresh"  # for what a new workspace is like
    number = 0
    for deed in deeds:
        fatal = 0
        for kill in range(1, 200):
            number += 1
            thread = f"cli:{number}" if deed == "creating" else "cli:one"
            life = Life(number, behind, deed, thread)
            if deed == "exec" or fatal < 0:
                life.after_s = chance.uniform(0, DEEDS[deed].about_s)
            else:
                life.fatal = fatal = kill
            yield life
            behind = thread
            if fatal >= 0 and deed != "exec" and "done" in life.said:
                fatal = -kill
            elif kill + fatal >= RANDOM_KILLS and (fatal < 0 or deed == "exec"):
                break
    yield Life(number + 1, behind, None, "cli:one")


class Inquest:
    """Compares what each life finds with what the one before it was killed over."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._fresh: set[str] | None = None
        self._expected: Seen | None = None
        self._written = 0
        self.sandboxes: set[str] = set()
        #: How many sandboxes had not quite ended when the next one was up.
        self.late = 0
        self.hive = ""
        self.wrong: list[str] = []

    def hear(self, life: Life) -> None:
        said = life.said
        self._compare(life, said)
        self._expected = said.get("before")
        self._written = said.get("written", 0)
        if str(self._home) in Path("/proc/self/mountinfo").read_text():
            self._say(life, "left a mount on the host")
        chain = said.get("chain", [])
        if any(before != after for (_, before), (after, _) in pairwise(chain)):
            self._say(life, f"found a record with gaps: {chain}")

    def _compare(self, life: Life, said: Seen) -> None:
        self.sandboxes.add(said["sandbox"])
        self.hive = said["hive"]
        self.late += said["late"]
        if not said["alone"]:
            self._say(life, "was not alone")
        if said["workspaces"].count(said["id"]) != 1:
            self._say(life, f"found workspaces {said['workspaces']}")
        self._fresh = self._fresh or {*said["seen"]}
        if self._expected is None or said["status"] in (None, "destroyed"):
            if {*said["seen"]} != self._fresh:
                self._say(life, f"found files of before in a new workspace: {said['seen']}")
            return
        if said["seen"] != self._expected:
            self._say(life, f"found other files: {differences(said['seen'], self._expected)}")
        if said["grows"]:
            self._say(life, "shared the workspace with the life before it")
        lines = said["log"].split()
        if lines != [str(number + 1) for number in range(len(lines))] or len(lines) < self._written:
            self._say(life, f"found {len(lines)} lines of {self._written}")

    def _say(self, life: Life, what: str) -> None:
        self.wrong.append(f"life {life.number} ({life.deed}), after {life.behind}: {what}")


def differences(one: Seen, other: Seen) -> list[str]:
    return sorted(path for path in {*one, *other} if one.get(path) != other.get(path))


def eventually(holds: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def swept(sandboxes: set[str]) -> bool:
    sweep()
    return not any((records_folder() / f"{sandbox}.json").exists() for sandbox in sandboxes)


def prepare() -> None:
    """Import once what every life needs."""
    for module in ("aiosqlite", "psycopg", "skep.sandbox.bubblewrap", "skep.workspace.archiving"):
        import_module(module)


def main() -> None:
    prepare()
    home, url, deeds = Path(sys.argv[1]), sys.argv[2], sys.argv[3:] or list(DEEDS)
    inquest = Inquest(home)
    kills: Counter[str] = Counter()
    began = time.monotonic()
    for life in lives(deeds):
        life.run(home, url)
        inquest.hear(life)
        kills[life.deed or "last"] += "done" not in life.said
    if not eventually(lambda: not inside(inquest.hive), GONE_S):
        inquest.wrong.append(f"something runs on in {inside(inquest.hive)}")
    if not eventually(lambda: swept(inquest.sandboxes), 10.0):
        inquest.wrong.append("records of dead sandboxes stay")
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"kills": kills, "late": inquest.late, "seconds": seconds, "wrong": inquest.wrong}))


if __name__ == "__main__":
    main()
