"""A Docker engine of this machine, spoken to through its SDK.

The SDK blocks, so every call is made in a thread of the engine's own: the event loop's common ones are for files. What
the SDK raises is turned into Skep's errors here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from skep.errors import InvalidRequest, LimitReached, SandboxLost, SandboxUnusable, SkepError, StorageFull
from skep.sandbox.mechanisms import DEFAULT_ENGINE

if TYPE_CHECKING:
    from docker import APIClient

T = TypeVar("T")

#: Docker 19.03, which knows everything that is asked of it here.
_OLDEST_API = (1, 40)
_ANSWER_S = 60
_THREADS = 8


class Engine:
    """One engine. Get it with `Engine.at`: a process has one for each address."""

    def __init__(self, host: str, api: APIClient, info: dict[str, Any]) -> None:
        self.host = host
        self.cpus = int(info.get("NCPU") or 1)
        self.options = frozenset(str(option) for option in info.get("SecurityOptions") or ())
        self._api = api
        self._threads = _threads()

    @classmethod
    async def at(cls, host: str | None = None) -> Engine:
        """Return the engine at an address such as unix:///var/run/docker.sock, once it has answered."""
        host = host or DEFAULT_ENGINE
        key = (os.getpid(), host)  # what was forked shares no connection with its parent
        if key not in _engines:
            await asyncio.get_running_loop().run_in_executor(_threads(), cls._meet, key)
        return _engines[key]

    @classmethod
    def _meet(cls, key: tuple[int, str]) -> None:
        with _meeting:
            if key not in _engines:
                _engines[key] = cls._met(key[1])

    @classmethod
    def _met(cls, host: str) -> Engine:
        if not host.startswith("unix://"):
            raise SandboxUnusable(
                f"the engine at {host!r} is not on this machine, and its containers could not see a workspace here",
                hint="use a local engine, such as unix:///var/run/docker.sock",
            )
        docker = _sdk()
        with explained(host):
            _knock(host)
            api = docker.APIClient(base_url=host, version="auto", timeout=_ANSWER_S)
            info = api.info()
        engine = cls(host, api, info)
        engine._require_usable()
        return engine

    async def ask(self, work: Callable[[APIClient], T]) -> T:
        """Call the engine in a thread. Whoever is cancelled meanwhile goes when the engine has done it all the same."""
        call = asyncio.get_running_loop().run_in_executor(self._threads, self.ask_now, work)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            if not call.cancelled():
                call.exception()  # nobody is left to hear of it
            raise

    def ask_now(self, work: Callable[[APIClient], T]) -> T:
        """Call the engine from a thread that may block."""
        with explained(self.host):
            _knock(self.host)
            return work(self._api)

    def _require_usable(self) -> None:
        if tuple(int(part) for part in self._api.api_version.split(".")) < _OLDEST_API:
            raise SandboxUnusable(
                f"the engine at {self.host} is too old: it speaks version {self._api.api_version} of its interface",
                hint="upgrade to Docker 19.03 or newer",
            )
        if any("name=rootless" in option for option in self.options):
            raise SandboxUnusable(
                f"the engine at {self.host} is rootless, and its users are not those of this machine",
                hint="use the mechanism bubblewrap, which needs no root either",
            )
        if not any("name=seccomp" in option for option in self.options):
            raise SandboxUnusable(
                f"the engine at {self.host} does not filter system calls", hint="use a kernel and engine with seccomp"
            )


_engines: dict[tuple[int, str], Engine] = {}
_pools: dict[int, ThreadPoolExecutor] = {}
_making, _meeting = threading.Lock(), threading.Lock()


def _threads() -> ThreadPoolExecutor:
    with _making:
        return _pools.setdefault(os.getpid(), ThreadPoolExecutor(_THREADS, "skep-engine"))


def _sdk() -> Any:
    try:
        import docker
    except ImportError as error:
        raise SandboxUnusable("the mechanism docker needs the docker SDK", hint="pip install 'skep[docker]'") from error
    return docker


def _knock(host: str) -> None:
    """Make sure that somebody is there: the SDK leaves a socket behind for each time that nobody is."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(_ANSWER_S)
        door.connect(host.removeprefix("unix://"))


@contextmanager
def explained(host: str) -> Iterator[None]:
    """Turn what the SDK raises into an error of Skep's."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except APIError as error:
        raise _answered(str(error.explanation or error), error.status_code) from error
    except (DockerException, RequestException, OSError) as error:
        raise _unreached(host, error) from error


def _answered(said: str, status: int | None) -> SkepError:
    """Say what an engine that answered did not do."""
    words = said.lower()
    if "no space left" in words or "disk quota exceeded" in words:
        return StorageFull(f"the engine has no room left: {said}", hint="docker system prune, or give it a larger disk")
    if "unknown runtime specified" in words or "invalid runtime name" in words:
        return InvalidRequest(f"the engine does not know that runtime: {said}", hint="`docker info` lists those it has")
    if "bind source path does not exist" in words:
        return SandboxUnusable(
            f"the engine does not see this machine's files: {said}",
            hint="run Skep where the engine runs, not in a container that only has its socket",
        )
    if status == 404:
        return SandboxLost(f"the container is gone: {said}", hint="resolve the session or create a new sandbox")
    if status == 400:
        return InvalidRequest(f"the engine refuses the container: {said}", hint="change what was asked for")
    if "cannot allocate memory" in words or "resource temporarily unavailable" in words:
        return LimitReached(f"the engine cannot start another container: {said}", hint="end some, or add memory")
    return SandboxUnusable(f"the engine cannot do it: {said}", hint="`docker info` and the engine's log say more")


def _unreached(host: str, error: BaseException) -> SandboxUnusable:
    """Say why an engine did not answer."""
    match _number(error):
        case errno.ENOENT | errno.ECONNREFUSED:
            return SandboxUnusable(
                f"no Docker engine answers at {host}", hint="start it (`systemctl start docker`), or use bubblewrap"
            )
        case errno.EACCES | errno.EPERM:
            return SandboxUnusable(
                f"this user may not use the Docker engine at {host}",
                hint="add the user to the group `docker`, which is as good as root, or use bubblewrap",
            )
        case _:
            return SandboxUnusable(f"the Docker engine at {host} has gone: {error}", hint="start it again")


def _number(error: BaseException | None) -> int | None:
    """Find the system's own reason: the SDK wraps it, and at times only as an argument."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        inner = next((part for part in error.args if isinstance(part, BaseException)), None)
        error = inner or error.__cause__ or error.__context__
    return None
