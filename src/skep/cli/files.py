"""skep files: look at and change the files of a hive's workspace."""

from __future__ import annotations

import asyncio
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, TypeVar

import typer

from skep.cli.desk import DEFAULT_ACCOUNT, DEFAULT_THREAD, Account, Thread, complete_workspace, entered, settle
from skep.cli.terminal import AsJson, examples, print_json, print_line, print_table

if TYPE_CHECKING:
    from skep.sandbox.files import Entry, Files

T = TypeVar("T")

app = typer.Typer(help="Look at and change the files of a hive's workspace.", no_args_is_help=True)

HiveOption = Annotated[
    str,
    typer.Option(
        "--hive",
        "-H",
        help="Name of the hive, or id of the workspace.",
        autocompletion=complete_workspace,
        metavar="HIVE",
        show_default=False,
    ),
]
PathArgument = Annotated[
    str, typer.Argument(help="Path in the workspace, as seen from inside.", metavar="PATH", show_default=False)
]


@app.command("ls", epilog=examples("skep files ls --hive garden", "skep files ls reports --hive garden --json"))
def list_(
    hive: HiveOption,
    path: Annotated[str, typer.Argument(help="Folder in the workspace.", metavar="PATH")] = ".",
    account: Account = DEFAULT_ACCOUNT,
    thread: Thread = DEFAULT_THREAD,
    as_json: AsJson = False,
) -> None:
    """List a folder."""

    async def work(files: Files) -> list[Entry]:
        return await files.list(_within(path))

    entries = _with_files(hive, account, thread, work)
    if as_json:
        print_json([_as_json(entry) for entry in entries])
        return
    print_table(("MODE", "SIZE", "CHANGED", "NAME"), [_row(entry) for entry in entries], empty=f"{path} is empty.")


@app.command(
    epilog=examples(
        "skep files get report.pdf --hive garden  # into the current folder",
        "skep files get notes.txt - --hive garden  # to the screen or a pipe",
    )
)
def get(
    hive: HiveOption,
    path: PathArgument,
    target: Annotated[
        str | None, typer.Argument(help="Where to put it; - for standard output.", metavar="TARGET", show_default=False)
    ] = None,
    account: Account = DEFAULT_ACCOUNT,
    thread: Thread = DEFAULT_THREAD,
) -> None:
    """Copy a file out of the workspace."""

    async def work(files: Files) -> tuple[str, int]:
        return await copy_out(files.stream(_within(path)), Path(path).name, target)

    place, size = _with_files(hive, account, thread, work)
    if target != "-":
        print_line(f"{path} -> {place} ({size:,} bytes)")


@app.command(
    epilog=examples(
        "skep files put report.csv --hive garden",
        "skep files put report.csv data/in.csv --hive garden",
        "echo hello | skep files put - hello.txt --hive garden",
    )
)
def put(
    hive: HiveOption,
    source: Annotated[str, typer.Argument(help="File here; - for standard input.", metavar="SOURCE")],
    path: Annotated[
        str | None, typer.Argument(help="Path in the workspace.", metavar="PATH", show_default=False)
    ] = None,
    account: Account = DEFAULT_ACCOUNT,
    thread: Thread = DEFAULT_THREAD,
) -> None:
    """Copy a file into the workspace, replacing what is at the path."""
    from skep.errors import InvalidRequest

    if source == "-" and path is None:
        raise InvalidRequest("standard input has no name", hint="say where to put it: skep files put - notes.txt")
    place = path or Path(source).name

    async def work(files: Files) -> None:
        await files.write(_within(place), _from_here(source))

    _with_files(hive, account, thread, work)
    print_line(f"{source} -> {place}")


@app.command(
    epilog=examples("skep files edit notes.txt --hive garden", "EDITOR=nano skep files edit notes.txt -H garden")
)
def edit(
    hive: HiveOption, path: PathArgument, account: Account = DEFAULT_ACCOUNT, thread: Thread = DEFAULT_THREAD
) -> None:
    """Edit a text file with your own editor ($VISUAL or $EDITOR); it is made if it is not there."""
    from skep.errors import Conflict, InvalidRequest, NotFound

    async def read(files: Files) -> bytes:
        try:
            return await files.read(_within(path), limit_bytes=10 << 20)
        except NotFound:
            return b""

    before = _with_files(hive, account, thread, read)
    try:
        text = before.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not text", hint=f"copy it out with: skep files get {path}") from error
    after = _edit(text, path)
    if after == text:
        print_line(f"{path} is unchanged")
        return

    async def write(files: Files) -> None:
        if await read(files) != before:
            raise Conflict(f"{path} changed while you edited it", hint="look at it, and edit it again")
        await files.write(_within(path), after)

    _with_files(hive, account, thread, write)
    print_line(f"saved {path}")


def _edit(text: str, path: str) -> str:
    """Let the user change a text in an editor of their own; return it as they left it."""
    import shlex
    import subprocess
    import tempfile

    from skep.errors import InvalidRequest

    variables = settle()[0].variables
    editor = variables.get("VISUAL") or variables.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="skep-edit-") as folder:
        draft = Path(folder) / Path(path).name
        draft.write_text(text)
        try:
            ended = subprocess.run([*shlex.split(editor), str(draft)], check=False)
        except OSError as error:
            raise InvalidRequest(
                f"the editor {editor!r} does not start: {error.strerror}", hint="set EDITOR"
            ) from error
        if ended.returncode != 0:
            raise InvalidRequest(f"the editor {editor!r} ended with {ended.returncode}; nothing was saved")
        return draft.read_text()


def _with_files(hive: str, account: str, thread: str, work: Callable[[Files], Awaitable[T]]) -> T:
    """Work on the files as a sandbox shows them: only there are all layers of a workspace one folder."""

    async def run() -> T:
        async with entered(hive, account, thread=thread) as sandbox:
            return await work(sandbox.files)

    return asyncio.run(run())


def _within(path: str) -> str:
    """Return a path if it is one of the workspace's."""
    from posixpath import join, normpath

    from skep.errors import InvalidRequest

    if not f"{normpath(join('/workspace', path))}/".startswith("/workspace/"):
        raise InvalidRequest(f"{path[:200]!r} is not below /workspace", hint="give a path in the workspace")
    return path


async def _from_here(source: str) -> AsyncIterator[bytes]:
    with _opened(source) as file:
        while piece := await asyncio.to_thread(file.read, 1 << 20):
            yield piece


@contextmanager
def _opened(source: str) -> Iterator[IO[bytes]]:
    from skep.errors import NotFound

    if source == "-":
        yield sys.stdin.buffer
        return
    try:
        file = Path(source).open("rb")  # noqa: SIM115  closed below; only the opening is explained
    except OSError as error:
        raise NotFound(f"{source} cannot be read: {error.strerror}", hint="check the path") from error
    with file:
        yield file


async def copy_out(pieces: AsyncIterator[bytes], name: str, target: str | None) -> tuple[str, int]:
    """Write what comes to a file or to standard output; return where it went, and its size."""
    if target == "-":
        return "-", await _to_stdout(pieces)
    file = _placed(name, target)
    return str(file), await _to_file(pieces, file)


def _placed(name: str, target: str | None) -> Path:
    place = Path(target or name)
    return place / name if place.is_dir() else place


async def _to_stdout(pieces: AsyncIterator[bytes]) -> int:
    size = 0
    async for piece in pieces:
        size += len(piece)
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
    return size


async def _to_file(pieces: AsyncIterator[bytes], target: Path) -> int:
    """Write beside the target first, so that a copy cut short never looks whole."""
    with _replacing(target) as file:
        async for piece in pieces:
            await asyncio.to_thread(file.write, piece)
        return file.tell()


@contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    from skep.errors import InvalidRequest

    draft = target.with_name(f".{target.name}.part")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(target)
    except OSError as error:
        raise InvalidRequest(f"{target} cannot be written: {error.strerror}", hint="choose another place") from error
    finally:
        draft.unlink(missing_ok=True)


def _row(entry: Entry) -> tuple[str, str, str, str]:
    kinds = {"file": stat.S_IFREG, "folder": stat.S_IFDIR, "link": stat.S_IFLNK, "other": stat.S_IFIFO}
    changed = datetime.fromtimestamp(entry.modified_at).astimezone()
    name = f"{entry.name} -> {entry.target}" if entry.target is not None else entry.name
    return (stat.filemode(kinds[entry.kind] | entry.mode), f"{entry.size:,}", f"{changed:%Y-%m-%d %H:%M}", name)


def _as_json(entry: Entry) -> dict[str, object]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "size": entry.size,
        "mode": oct(entry.mode),
        "modified_at": entry.modified_at,
        "target": entry.target,
    }
