"""A controller that does as it is told: `python session_racer.py HOME URL HOST [TTL]`.

Each line of its standard input is a JSON list, a word and its arguments; each is answered with one line. A mistake
that Skep names is answered with the name of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from tests.sessions.yard import Yard, inside, open_yard

from skep.errors import SkepError
from skep.sandbox.sandbox import Sandbox
from skep.sessions import putting_away
from skep.sessions.computers import Computers, Condition, Held, Mended
from skep.sessions.recovery import Pace
from skep.sessions.session import Session
from skep.workspace.packages.packages import Installed


class Sleepy:
    """Real computers; before a workspace is freed, this process falls asleep until it is woken."""

    def __init__(self, computers: Computers) -> None:
        self._computers = computers

    async def condition(self, session: Session) -> Condition:
        return await self._computers.condition(session)

    async def make(self, session: Session) -> None:
        await self._computers.make(session)

    def hold(self, session: Session) -> AbstractAsyncContextManager[Held]:
        return self._computers.hold(session)

    def join(self, session: Session) -> AbstractAsyncContextManager[Sandbox]:
        return self._computers.join(session)

    async def hand_over(self, session: Session) -> None:
        await self._computers.hand_over(session)

    async def install(self, session: Session, *, python: Sequence[str], node: Sequence[str]) -> Installed:
        return await self._computers.install(session, python=python, node=node)

    async def mend(self, session: Session) -> Mended:
        return await self._computers.mend(session)

    async def save(self, session: Session) -> str:
        return await self._computers.save(session)

    async def free(self, session: Session) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        await self._computers.free(session)

    async def unarchive(self, session: Session, archive: str) -> None:
        await self._computers.unarchive(session, archive)

    async def destroy(self, session: Session) -> None:
        await self._computers.destroy(session)


async def resolve(yard: Yard, thread: str) -> dict[str, object]:
    """Resolve a key, and leave a mark in its workspace."""
    computer = await yard.resolve(thread)
    assert (await computer.run(f"touch mark-{os.getpid()}; sync mark-{os.getpid()}")).ok
    live = yard.sessions.live(yard.id(thread))
    assert live is not None
    return {"id": live.session.id, "token": live.session.token, "joined": live.joined}


async def look(yard: Yard, thread: str) -> dict[str, object]:
    """Tell what is in a workspace, and how many sandboxes there are."""
    ran = await (await yard.resolve(thread)).run("ls")
    return {"files": ran.text.split(), "sandboxes": len(inside(yard.hive.id))}


async def run(yard: Yard, thread: str, command: str) -> str:
    return (await (await yard.resolve(thread)).run(command)).text


async def leave(yard: Yard) -> None:
    await putting_away.stop_all(yard.sessions)


async def write(yard: Yard, thread: str) -> None:
    """Write what this process believes to the record."""
    live = yard.sessions.live(yard.id(thread))
    assert live is not None
    await yard.ledger.note(live.session, last_error="written late")


async def archive(yard: Yard, thread: str) -> None:
    await putting_away.archive(yard.sessions, yard.id(thread))


async def stop(yard: Yard, thread: str) -> str:
    return (await putting_away.stop(yard.sessions, yard.id(thread))).status


async def show(yard: Yard, thread: str) -> dict[str, object]:
    session = await yard.session(thread)
    here = (yard.home / "workspaces" / session.id).exists()
    return {
        "status": session.status,
        "host": session.host,
        "last_error": session.last_error,
        "generation": session.generation,
        "here": here,
    }


WORDS: dict[str, Any] = {word.__name__: word for word in (resolve, look, run, leave, write, archive, stop, show)}


async def obey(yard: Yard) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        word, *arguments = json.loads(line)
        try:
            answer = {"did": await WORDS[word](yard, *arguments)}
        except SkepError as error:
            answer = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        print(json.dumps(answer), flush=True)


async def main(home: str, url: str, host: str, ttl_s: str = "15") -> None:
    settings = {"workspace": {"archive_url": str(Path(home).parent / "archives")}}
    pace = Pace(look_s=0.02)
    async with open_yard(
        Path(home), url, host=host, ttl_s=float(ttl_s), settings=settings, wrap=Sleepy, pace=pace
    ) as yard:
        print(json.dumps({"did": "begin"}), flush=True)
        await obey(yard)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
