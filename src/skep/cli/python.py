"""skep python: run code cells in a sandbox."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import typer

from skep.cli.desk import (
    DEFAULT_ACCOUNT,
    DEFAULT_THREAD,
    Account,
    Thread,
    entered,
    lodge,
    open_apiary,
    open_chooser,
    opened_program,
    opened_sessions,
    settle,
    tell,
)
from skep.cli.sandbox import HiveOption, TicketOption, TimeoutOption
from skep.cli.terminal import AsJson, examples, print_json, print_table

if TYPE_CHECKING:
    from skep.app.keeper import Kept
    from skep.sandbox.results import Cell, Event
    from skep.sandbox.sandbox import Sandbox

T = TypeVar("T")

EPILOG = examples(
    "skep python -c '6 * 7'  # one cell in a throwaway sandbox",
    "skep python report.py --hive garden --pictures out  # a file as one cell, in the hive's workspace",
    "echo 'print(1)' | skep python  # from a pipe",
    "skep python --context bees -c 'x = 1'  # variables that the next call with --context bees still has",
    "skep python --context bees --end  # and their end",
    "skep python  # cell after cell at a prompt",
)


@dataclass(frozen=True, slots=True)
class Cells:
    """Where cells run: a way to run one, and a way to break into it."""

    run: Callable[[str], AsyncGenerator[Event, None]]
    interrupt: Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class At:
    """Where code runs: in a thread of a hive, or in a sandbox that is thrown away."""

    hive: str | None
    account: str
    thread: str

    async def kept(self, *, ready: bool) -> Kept:
        """Say what a keeper keeps contexts for; `ready`, there is a workspace for it."""
        from skep.app.keeper import Kept

        if self.hive is None:
            return Kept()
        environment, settings = settle()
        async with opened_program(environment, settings) as program:
            apiary = open_apiary(environment, settings, program)
            residence = await lodge(program, apiary, self.hive, self.account, thread=self.thread)
            if residence.hive is None or residence.hive.deleted_at is not None:
                return Kept(residence.id)
            if ready and not apiary.has(residence.id):
                # Here, and not by the keeper, which can tell nobody that it takes its time.
                async with opened_sessions(program, environment) as sessions:
                    await sessions.open(residence.hive, residence.session, account_id=self.account)
            return Kept(residence.id, residence.hive.id, residence.key, self.account)


def python(  # noqa: PLR0913, PLR0917  one per option
    file: Annotated[
        Path | None,
        typer.Argument(help="File on this machine to run as one cell; - for standard input.", show_default=False),
    ] = None,
    code: Annotated[
        str | None, typer.Option("--code", "-c", help="Code to run as one cell.", show_default=False)
    ] = None,
    hive: HiveOption = None,
    account: Account = DEFAULT_ACCOUNT,
    thread: Thread = DEFAULT_THREAD,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            help="Keep the variables under this name for later calls, until --end or 15 minutes without one.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="End the context.")] = False,
    contexts: Annotated[bool, typer.Option("--contexts", help="List the contexts that are kept.")] = False,
    ticket: TicketOption = None,
    pictures: Annotated[Path, typer.Option("--pictures", help="Folder on this machine to save pictures in.")] = Path(),
    timeout: TimeoutOption = None,
    as_json: AsJson = False,
) -> None:
    """Run Python in a sandbox: the value of the last expression is shown, tables as tables, pictures as files.

    Without code and at a terminal it reads cell after cell. Lines such as !ls, %pip install and %%bash work too.
    """
    at = At(hive, account, thread)
    if contexts or end:
        raise typer.Exit(asyncio.run(_look_after(at, context if end else None, as_json=as_json)))
    source = _source(code, file)
    _refuse_ticket(hive, context, ticket)
    limit_s = math.inf if timeout is None else timeout
    opened = _fresh(at, ticket, limit_s) if context is None else _kept(at, context, limit_s)
    if source is None:
        raise typer.Exit(_converse(opened, pictures))

    async def work(source: str) -> int:
        async with opened as cells:
            with _interrupting(cells):
                return await _one(cells, source, pictures, as_json=as_json)

    raise typer.Exit(asyncio.run(work(source)))


def _source(code: str | None, file: Path | None) -> str | None:
    """Return the code to run, or None to read it cell after cell from a terminal."""
    from skep.errors import InvalidRequest

    if code is not None and file is not None:
        raise InvalidRequest("there is code and a file, and only one of them can run", hint="give -c or a file")
    if code is not None:
        return code
    if file is None and sys.stdin.isatty():
        return None
    if file is None or str(file) == "-":
        return sys.stdin.read()
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {str(file)!r}: {error}", hint="give a file of Python code") from error


def _refuse_ticket(hive: str | None, context: str | None, ticket: str | None) -> None:
    from skep.errors import InvalidRequest

    if ticket is not None and hive is None:
        raise InvalidRequest("a ticket is shown in the workspace of a hive", hint="name the hive with --hive")
    if ticket is not None and context is not None:
        raise InvalidRequest("what a kept context shows is settled when it begins", hint="leave out --ticket")


@asynccontextmanager
async def _fresh(at: At, ticket: str | None, limit_s: float) -> AsyncGenerator[Cells, None]:
    """Give cells in a context that lasts as long as this command."""
    from skep.app.computer import open_sandbox
    from skep.sandbox.interpreter import Interpreter

    environment, settings = settle()
    opened: AbstractAsyncContextManager[Sandbox] = (
        open_sandbox(settings, open_chooser(environment, settings))
        if at.hive is None
        else entered(at.hive, at.account, thread=at.thread, ticket=ticket)
    )
    async with opened as sandbox, Interpreter(sandbox) as interpreter:
        context = interpreter.context()
        yield Cells(lambda code: context.stream(code, timeout_s=limit_s), context.interrupt)


@asynccontextmanager
async def _kept(at: At, name: str, limit_s: float) -> AsyncGenerator[Cells, None]:
    """Give cells in a context that outlives this command."""
    from skep.app.keeper import Door, Request, ask, run_kept, start_keeper

    environment, _ = settle()
    kept = await at.kept(ready=True)
    door = Door.of(environment.paths, kept.workspace_id)

    def start() -> int:
        return start_keeper(environment, kept)

    async def interrupt() -> None:
        async for _ in ask(door, Request(act="interrupt", context=name), start=start):
            pass

    yield Cells(lambda code: run_kept(door, name, code, timeout_s=limit_s, start=start, tell=tell), interrupt)


async def _look_after(at: At, ended: str | None, *, as_json: bool) -> int:
    """End a kept context, or list those that there are."""
    from skep.app.keeper import Door, NoKeeper, Request, ask

    request = Request(act="list") if ended is None else Request(act="end", context=ended)
    door = Door.of(settle()[0].paths, (await at.kept(ready=False)).workspace_id)
    found: list[dict[str, object]] = []
    try:
        async for said in ask(door, request):
            found = said["contexts"]
    except NoKeeper:
        if ended is not None:
            door.mark(ended).unlink(missing_ok=True)
    if ended is None and as_json:
        print_json(found)
    elif ended is None:
        rows = [[str(one[key]) for key in ("name", "language", "state", "cells")] for one in found]
        print_table(("CONTEXT", "LANGUAGE", "STATE", "CELLS"), rows, empty="No context is kept.")
    return 0


async def _one(cells: Cells, source: str, pictures: Path, *, as_json: bool) -> int:
    from skep.cli.cellview import exit_code
    from skep.sandbox.results import cell_as_json

    if not as_json:
        return await _show(cells, source, pictures, number=1)
    cell = await _last(cells.run(source))
    print_json(cell_as_json(cell))
    return exit_code(cell)


def _converse(opened: AbstractAsyncContextManager[Cells], pictures: Path) -> int:
    """Read cells from a terminal until Ctrl-D.

    The sandbox is looked after in a thread of its own: this one waits for a person, and gets the Ctrl-C.
    """
    from skep.cli.prompt import read_cell

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="skep-cells", daemon=True)
    thread.start()

    def wait(work: Coroutine[Any, Any, T], on_interrupt: Callable[[], object] = lambda: None) -> T:
        future = asyncio.run_coroutine_threadsafe(work, loop)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                on_interrupt()

    closing = AsyncExitStack()
    cells = wait(closing.enter_async_context(opened))
    number = 0
    try:
        while (source := read_cell(number + 1)) is not None:
            if source.strip():
                number += 1
                wait(
                    _show(cells, source, pictures, number=number),
                    lambda: asyncio.run_coroutine_threadsafe(cells.interrupt(), loop),
                )
    finally:
        wait(closing.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    return 0


async def _show(cells: Cells, source: str, pictures: Path, *, number: int) -> int:
    """Run a cell and show everything as it comes; return the exit code for how it ended."""
    from skep.cli.cellview import show_end, show_result
    from skep.sandbox.results import Cell, Printed, Result

    async with aclosing(cells.run(source)) as events:
        async for event in events:
            match event:
                case Printed(stream="stdout", text=text):
                    _write(sys.stdout, text)
                case Printed(text=text):
                    _write(sys.stderr, text)
                case Result():
                    show_result(event, cell=number, pictures=pictures)
                case Cell():
                    return show_end(event)
    return 1


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


async def _last(events: AsyncGenerator[Event, None]) -> Cell:
    from skep.errors import SandboxLost
    from skep.sandbox.results import Cell

    async with aclosing(events):
        async for event in events:
            if isinstance(event, Cell):
                return event
    raise SandboxLost("the cell did not come to an end", hint="try again")


@contextmanager
def _interrupting(cells: Cells) -> Iterator[None]:
    """While a cell runs, let Ctrl-C break into it; the third one ends this program."""
    loop = asyncio.get_running_loop()
    sent: list[asyncio.Task[None]] = []

    def interrupt() -> None:
        sent.append(asyncio.ensure_future(cells.interrupt()))
        if len(sent) > 1:
            loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
