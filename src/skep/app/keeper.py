"""Contexts that outlive a command: one process per workspace keeps a sandbox and its kernels between calls.

The process is started by the first call that names a context, and ends when its last context is ended, when its
sandbox is lost, or after a while in which nobody called. What a context knew is then gone; a mark on disk remembers
that there was one, so that the next cell says so instead of starting silently with nothing.

It holds the workspace of its contexts, and other commands join it. While another command holds that workspace it waits:
as a guest it would keep that command from ending for as long as a context lasts. A server's guest it may be.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from skep import errors
from skep.app import presence
from skep.app.apiary import Apiary
from skep.app.choosing import Chooser
from skep.app.computer import open_sandbox
from skep.app.program import Program, open_program
from skep.app.reception import open_sessions
from skep.config import Paths, Settings
from skep.config.environment import Environment
from skep.config.file import load
from skep.errors import InvalidRequest, SkepError, Unavailable, WorkspaceBusy
from skep.sandbox.context import Context
from skep.sandbox.interpreter import Interpreter
from skep.sandbox.results import Event, dump_event, read_event
from skep.sandbox.sandbox import Sandbox
from skep.sessions.computer import Computer
from skep.sessions.controller import owner
from skep.sessions.ledger import Roll
from skep.sessions.session import Session
from skep.sessions.sessions import Sessions
from skep.state.accounts import utc_now

T = TypeVar("T")

IDLE_S = 15 * 60.0
_START_S = 30.0
_PAUSE_S = 0.02
_BUSY_S = 0.2
_MOST_BYTES = 256 << 20


class NoKeeper(Exception):
    """Nobody keeps contexts for this workspace."""


class Request(BaseModel):
    """What a command asks of a keeper."""

    model_config = ConfigDict(frozen=True)

    act: Literal["run", "interrupt", "end", "list"]
    context: str = "default"
    code: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Door:
    """Where the keeper of a workspace is found: a folder of this user's own."""

    folder: Path

    @classmethod
    def of(cls, paths: Paths, workspace_id: str | None) -> Door:
        folder = paths.home / "contexts" / (workspace_id or "none")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return cls(folder)

    @property
    def waiting(self) -> Path:
        """Says what a keeper that has not started yet waits for."""
        return self.folder / "waiting"

    def mark(self, context: str) -> Path:
        return self.folder / f"{context}.context"

    def shut(self) -> None:
        (self.folder / "socket").unlink(missing_ok=True)

    @asynccontextmanager
    async def socket_path(self) -> AsyncGenerator[str, None]:
        """Give a path to the socket that is short enough, however deep the folder lies."""
        folder = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{folder}/socket"
        finally:
            os.close(folder)


class Keeper:
    """Serves the calls for one workspace."""

    def __init__(self, interpreter: Interpreter, door: Door, idle_s: float) -> None:
        self._interpreter = interpreter
        self._door = door
        self._idle_s = idle_s
        self._calls = 0
        self._used = time.monotonic()

    async def until_unused(self) -> None:
        """Return when there is nothing left to keep."""
        began = time.monotonic()
        while await self._interpreter.sandbox.alive():
            await asyncio.sleep(0.2)
            unused_s = time.monotonic() - self._used
            forgotten = not self._interpreter.contexts() and time.monotonic() - began > 1
            if self._calls == 0 and (unused_s > self._idle_s or (forgotten and unused_s > 1)):
                return

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._calls += 1
        try:
            await _send(writer, {"kind": "hello"})
            request = Request.model_validate_json(await _receive(reader))
            await self._unless_left(reader, self._answer(request, writer))
            await _send(writer, {"kind": "end"})
        except SkepError as error:
            with suppress(OSError):
                body = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
                await _send(writer, {"kind": "error", "error": body})
        except (OSError, EOFError, ValueError):
            pass  # the caller left, or is none of ours
        finally:
            self._calls -= 1
            self._used = time.monotonic()
            writer.close()

    async def _unless_left(self, reader: asyncio.StreamReader, answer: Any) -> None:
        """Answer, but stop when the caller hangs up: Ctrl-C there interrupts the cell here."""
        answering = asyncio.ensure_future(answer)
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
        with suppress(asyncio.CancelledError):
            await answering

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        match request.act:
            case "list":
                found = [_described(context) for context in self._interpreter.contexts()]
                await _send(writer, {"kind": "contexts", "contexts": found})
            case "interrupt":
                await self._interpreter.context(request.context).interrupt()
            case "end":
                self._door.mark(request.context).unlink(missing_ok=True)
                await self._interpreter.close_context(request.context)
            case "run":
                async with aclosing(
                    self._context(request.context).stream(request.code, timeout_s=request.timeout_s)
                ) as events:
                    async for event in events:
                        await _send(writer, dump_event(event))

    def _context(self, name: str) -> Context:
        known = name in {context.name for context in self._interpreter.contexts()}
        context = self._interpreter.context(name)
        mark = self._door.mark(name)
        if not known and mark.exists():
            context.say_lost()
        mark.touch(mode=0o600)
        return context


def _described(context: Context) -> dict[str, Any]:
    return {"name": context.name, "language": context.language, "state": context.state, "cells": context.cells}


@dataclass(frozen=True, slots=True)
class Kept:
    """What contexts are kept for: a session, a workspace that is nobody's, or a sandbox that is thrown away."""

    workspace_id: str | None = None
    hive_id: str | None = None
    key: str | None = None
    account_id: str | None = None


async def keep(environment: Environment, settings: Settings, kept_for: Kept, *, idle_s: float = IDLE_S) -> None:
    """Keep contexts until nobody needs them; return at once if another process does."""
    door = Door.of(environment.paths, kept_for.workspace_id)
    async with AsyncExitStack() as kept:
        with (door.folder / "lock").open("w") as lock:
            if not await _locked(lock.fileno()):
                return
            sandbox = await kept.enter_async_context(_sandbox(environment, settings, kept_for, door))
            interpreter = await kept.enter_async_context(Interpreter(sandbox))
            keeper = Keeper(interpreter, door, idle_s)
            async with door.socket_path() as path:
                door.shut()
                server = await asyncio.start_unix_server(keeper.serve, path)
                try:
                    await keeper.until_unused()
                finally:
                    door.shut()
                    server.close()
        # Without the lock: commands that have joined may take their time, and the next keeper says that it waits.


@asynccontextmanager
async def _sandbox(
    environment: Environment, settings: Settings, kept_for: Kept, door: Door
) -> AsyncGenerator[Sandbox, None]:
    paths, keys = environment.paths, environment.cloud_keys
    async with AsyncExitStack() as held:
        if kept_for.workspace_id is None:
            yield await held.enter_async_context(open_sandbox(settings, Chooser(settings, keys)))
            return
        program = await held.enter_async_context(open_program(paths, settings))
        chooser = Chooser(settings, keys, program=program)
        if kept_for.hive_id is None:
            workspace_id = kept_for.workspace_id
            workspaces = Apiary(paths, settings, chooser=chooser).at(workspace_id)
            workspace = await _patiently(door, lambda: held.enter_async_context(workspaces.hold(workspace_id)))
            yield await workspace.sandbox()
        else:
            sessions = await held.enter_async_context(open_sessions(program, chooser=chooser))
            computer = await _patiently(door, lambda: _open(program, sessions, kept_for))
            yield await held.enter_async_context(computer.sandbox("exec"))


async def _open(program: Program, sessions: Sessions, kept_for: Kept) -> Computer:
    account = kept_for.account_id or ""
    hive = await program.hives.show(kept_for.hive_id or "", account_id=account)
    now = utc_now()
    wanted = Session(kept_for.workspace_id or "", account, hive.id, kept_for.key or "", "creating", now, now, now)
    return await sessions.open(hive, wanted, account_id=account, join=await _is_servers(program, wanted.id))


async def _is_servers(program: Program, session_id: str) -> bool:
    """Say whether the server of this home runs a session: unlike a command, it ends whoever is its guest."""
    server = presence.find(program.paths, program.settings)
    row = await Roll(program.database).find(session_id)
    held = None if row is None or row.controller is None else owner(row.controller)
    return server is not None and held is not None and held.pid == server.pid


async def _patiently(door: Door, take: Callable[[], Awaitable[T]]) -> T:
    """Take a workspace as soon as no other process has it, and say meanwhile what is waited for."""
    try:
        while True:
            try:
                return await take()
            except WorkspaceBusy as busy:
                door.waiting.write_text(busy.message)
                await asyncio.sleep(_BUSY_S)
    finally:
        door.waiting.unlink(missing_ok=True)


Start = Callable[[], int]
Tell = Callable[[str], None]


def _quiet(_: str) -> None:
    """Tell nobody."""


async def ask(
    door: Door, request: Request, *, start: Start | None = None, tell: Tell = _quiet
) -> AsyncGenerator[dict[str, Any], None]:
    """Send a request to the keeper and yield what it says; without one, start it or raise `NoKeeper`."""
    reader, writer = await _connected(door, start, tell)
    try:
        await _send(writer, request.model_dump(mode="json"))
        while True:
            try:
                said = json.loads(await _receive(reader))
            except EOFError:
                raise Unavailable("the context's keeper is gone, and its variables with it", hint="try again") from None
            if said["kind"] == "error":
                raise _as_error(said["error"])
            if said["kind"] == "end":
                return
            yield said
    finally:
        writer.close()


async def run_kept(
    door: Door, context: str, code: str, *, timeout_s: float | None, start: Start, tell: Tell = _quiet
) -> AsyncGenerator[Event, None]:
    """Run a cell in a kept context and yield its events."""
    request = Request(act="run", context=context, code=code, timeout_s=timeout_s)
    async with aclosing(ask(door, request, start=start, tell=tell)) as said:
        async for one in said:
            yield read_event(one)


def start_keeper(environment: Environment, kept_for: Kept) -> int:
    """Start a keeper that outlives this process; return its pid."""
    door = Door.of(environment.paths, kept_for.workspace_id)
    log = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "skep.app.keeper", json.dumps(asdict(kept_for))],
        environment.variables,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, str(door.folder / "log"), log, 0o600),
        ],
        setsid=True,
    )


async def _connected(door: Door, start: Start | None, tell: Tell) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    pid, told = 0, ""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if pid and (waiting := _waits_for(door)):
            deadline = time.monotonic() + _START_S
            if waiting != told:
                tell(f"waiting: {waiting}")
            told = waiting
        try:
            async with door.socket_path() as path:
                reader, writer = await asyncio.open_unix_connection(path)
        except (FileNotFoundError, ConnectionRefusedError):
            if start is None:
                raise NoKeeper from None
            if pid and _has_ended(pid):
                break
            pid = pid or start()
            await asyncio.sleep(_PAUSE_S)
            continue
        with suppress(EOFError, OSError):
            await _receive(reader)  # its greeting: one that was about to end says nothing
            return reader, writer
        writer.close()
    said = (door.folder / "log").read_text(errors="replace").strip()[-2000:] if pid else ""
    raise Unavailable(f"the keeper of contexts did not start: {said or 'it gave no reason'}", hint="skep doctor")


def _waits_for(door: Door) -> str:
    try:
        return door.waiting.read_text()
    except FileNotFoundError:
        return ""


def _has_ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG) != (0, 0)


async def _locked(fd: int) -> bool:
    """Take the lock, for which a keeper that is about to end may have to be waited for."""
    deadline = time.monotonic() + _START_S / 3
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_PAUSE_S)
        else:
            return True
    return False


async def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    writer.write(len(body).to_bytes(4, "big") + body)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MOST_BYTES:
        raise ValueError("a message is too long")
    return await reader.readexactly(size)


def _as_error(body: dict[str, Any]) -> SkepError:
    kind = getattr(errors, str(body.get("type")), None)
    known = kind if isinstance(kind, type) and issubclass(kind, SkepError) else InvalidRequest
    return known(str(body.get("message")), hint=body.get("hint"))


def main() -> None:
    kept_for = Kept(**json.loads(sys.argv[1]))
    environment = Environment.read()
    try:
        asyncio.run(keep(environment, load(environment.paths), kept_for))
    except SkepError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
