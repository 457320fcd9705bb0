"""No isolation at all: commands run on this machine, as this user, and may do what this user may do.

For machines that are disposable themselves, and for people who know what their agent runs. The twin is a process of
this machine; relative paths, and those below /workspace in `files`, are below the folder; every other path is the
machine's own. Nothing is mounted, hidden or restricted, and that is said each time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import resource
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import ClassVar

from skep.errors import Denied, InvalidRequest, SandboxUnusable
from skep.sandbox import kernels
from skep.sandbox.binary import native
from skep.sandbox.erase import erase
from skep.sandbox.limits import CommandLimits
from skep.sandbox.link import Housing, PipeLink
from skep.sandbox.pipes import make_pipe
from skep.sandbox.recipe import Recipe
from skep.sandbox.stream import StreamSandbox

CAUTION = (
    "the sandbox mechanism `local` isolates nothing: commands run on this machine with the rights of this user, "
    "reach its files and its network, and outside the folder nothing is undone"
)
_SOURCES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from skep.sandbox.twin.inside.main import main; main()"
#: How long a twin takes at the most to end everything.
_END_S = 5.0

_log = logging.getLogger("skep.sandbox.local")


class LocalSandbox(StreamSandbox):
    """A twin that is a process of this machine."""

    mechanism: ClassVar[str] = "local"
    #: What whoever shows a sandbox to a person has to show too.
    caution = CAUTION

    def _rlimits(self, command: CommandLimits) -> dict[int, tuple[int, int]]:
        # The kernel would count all that this user runs, a desktop too.
        return {kind: value for kind, value in super()._rlimits(command).items() if kind != resource.RLIMIT_NPROC}


@dataclass(frozen=True, slots=True)
class Place:
    """A folder on this machine; one that was made for the sandbox goes with it."""

    path: str
    inode: int
    throwaway: bool

    @classmethod
    def new(cls, kind: str) -> Place:
        path = os.path.realpath(tempfile.mkdtemp(prefix=f"skep-{kind}-"))
        return cls(path, os.stat(path).st_ino, throwaway=True)

    @classmethod
    def kept(cls, folder: str) -> Place:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            found = os.stat(folder)
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"{folder!r} cannot be used as a workspace: {error}", hint="give a folder that you can write to"
            ) from error
        return cls(os.path.realpath(folder), found.st_ino, throwaway=False)

    async def leave(self) -> None:
        if self.throwaway:
            await asyncio.to_thread(erase, self.path, self.inode)


class Process(Housing):
    """The twin's process: its end is that of everything it started."""

    def __init__(self, process: subprocess.Popen[bytes], *places: Place) -> None:
        self.id = f"local-{secrets.token_hex(6)}"
        self._process = process
        self._places = places

    @property
    def pid(self) -> int:
        """The process on this machine that watches over the twin, its child."""
        return self._process.pid

    async def alive(self) -> bool:
        return self._process.poll() is None

    async def end(self) -> None:
        """Wait until the twin, which has been hung up on, has ended everything; then remove what was made for it."""
        try:
            await asyncio.to_thread(self._process.wait, _END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        for place in self._places:
            await place.leave()


async def start(recipe: Recipe) -> LocalSandbox:
    """Start a sandbox that is none, if that was asked for in so many words."""
    _require_consent(recipe)
    _require_possible(recipe)
    home = Place.kept(recipe.folder) if recipe.folder is not None else Place.new("workspace")
    cache = Place.new("cache")
    reading, theirs_out = make_pipe(None)
    theirs_in, writing = make_pipe(None)
    try:
        process = subprocess.Popen(  # noqa: ASYNC220 - a fork, which is not worth a thread
            [sys.executable, "-I", "-S", "-u", "-c", _BOOT, _SOURCES, "--home", home.path, "--bare", "--guarded"],
            stdin=theirs_in, stdout=theirs_out, stderr=subprocess.DEVNULL, cwd="/", env={}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        os.close(reading)
        os.close(writing)
        await cache.leave()
        await home.leave()
        raise SandboxUnusable(
            f"the twin cannot be started: {error}", hint="check this Python's installation"
        ) from error
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    made = await LocalSandbox.over(
        PipeLink(reading, writing),
        Process(process, home, cache),
        recipe,
        environment=_environment(home.path, cache.path),
        fakeroot=os.fspath(native("skep-fakeroot.so")),
    )
    made.home, made.cache, made.kernels = home.path, cache.path, kernels.FOLDER
    _log.warning("%s (sandbox %s in %s)", CAUTION, made.id, home.path)
    return made


def _require_consent(recipe: Recipe) -> None:
    unknown = set(recipe.options) - {"allow_unsafe"}
    if unknown:
        raise InvalidRequest(
            f"the mechanism local has no option {sorted(unknown)[0]!r}", hint="its only option is allow_unsafe"
        )
    if recipe.options.get("allow_unsafe") is not True:
        raise Denied(
            "the sandbox mechanism local isolates nothing, and was not allowed to run",
            hint="choose another mechanism, or set sandbox.allow_unsafe (options={'allow_unsafe': True}) on a "
            "machine that you can afford to lose",
        )


def _require_possible(recipe: Recipe) -> None:
    """Refuse what cannot be had without isolation, instead of leaving it out."""
    asked = {
        "a network with rules": recipe.network is not None,
        "a workspace in layers": recipe.stack is not None,
        "folders mounted elsewhere": bool(recipe.mounts),
        "folders shown read-only": bool(recipe.read_only),
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise InvalidRequest(
                f"the mechanism local cannot provide {what}: it isolates nothing",
                hint="choose bubblewrap or docker for that",
            )


def _environment(home: str, cache: str) -> dict[str, str]:
    name = _user_name()
    return {
        "HOME": home,
        "LANG": "C.UTF-8",
        "LOGNAME": name,
        "PATH": f"{home}/.venv/bin:{home}/node_modules/.bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "SHELL": "/bin/bash",
        "TMPDIR": "/tmp",
        "USER": name,
        "XDG_CACHE_HOME": cache,
    }


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
