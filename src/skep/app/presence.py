"""Whether a server of this home runs, and where: a file that counts only while a lock beside it is held."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from skep import __version__
from skep.config import Paths, Settings
from skep.errors import Conflict

#: How long a server waits for the lock: whoever only looks holds it for a moment.
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs. `state` is its database: one over another is none for this command."""

    pid: int
    address: str
    state: str
    version: str


_ADAPTER = TypeAdapter(Server)


class Post:
    """The place of a home's server, taken by this process."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "server.json"

    def announce(self, server: Server) -> None:
        """Let commands of this home find the server."""
        draft = self._file.with_name(f".server-{server.pid}.json")
        draft.write_text(json.dumps(asdict(server)) + "\n")
        draft.replace(self._file)

    def leave(self) -> None:
        self._file.unlink(missing_ok=True)


@contextmanager
def take(home: Path) -> Iterator[Post]:
    """Be the one server of this home until the end of the block; raise Conflict if there is one."""
    folder = home / "run"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock(fd, home)
        post = Post(folder)
        post.leave()  # what one that was killed left
        try:
            yield post
        finally:
            post.leave()
    finally:
        os.close(fd)


def _lock(fd: int, home: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _taken(home) from None
            time.sleep(0.02)
        else:
            return


def _taken(home: Path) -> Conflict:
    found = _read(home / "run" / "server.json")
    where = f" at {found.address} (process {found.pid})" if found else ""
    return Conflict(f"a server of {home} runs already{where}", hint="use it, or end it first")


def find(paths: Paths, settings: Settings) -> Server | None:
    """Return the server of this home that works on the database of these settings, if one runs."""
    folder = paths.home / "run"
    found = _read(folder / "server.json")
    if found is None or found.state != state_name(paths, settings) or not _held(folder / "server.lock"):
        return None
    return found


def check_version(server: Server) -> None:
    """Raise Conflict if the server is of another version: the two may not understand each other."""
    if server.version != __version__:
        raise Conflict(
            f"the server of this home is Skep {server.version}, and this command is Skep {__version__}",
            hint=f"end it (kill {server.pid}) and start it anew: skep serve",
        )


def state_name(paths: Paths, settings: Settings) -> str:
    """Name the database, and tell nothing about it: its address may hold a password."""
    return sha256((settings.state_url or paths.default_state_url).encode()).hexdigest()[:32]


def _read(file: Path) -> Server | None:
    try:
        return _ADAPTER.validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _held(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
