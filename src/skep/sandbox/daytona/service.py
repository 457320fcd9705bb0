"""Daytona's SDK: every name of it that Skep uses is in this file, and every error of it becomes one of Skep's here."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skep.errors import (
    Conflict,
    Denied,
    InvalidRequest,
    LimitReached,
    NotFound,
    SandboxLost,
    SandboxUnusable,
    SkepError,
    Unavailable,
)

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox, DaytonaError
    from daytona.handle.async_pty_handle import AsyncPtyHandle

#: How long the service may take to answer, and to bring a machine from one state into another.
_ANSWER_S, _CHANGE_S = 30.0, 120.0
_LOOK_S = 0.5
_TOLD_CHARS = 300
#: A shell on a terminal would write what is typed there into its home.
_NO_HISTORY = {"HISTFILE": "/dev/null"}
#: The states in which a machine can be started, those on the way there, on the way to run, and to nothing.
_AT_REST, _LEAVING = ("stopped", "archived", "paused"), ("stopping", "archiving", "pausing")
_COMING, _GONE = ("creating", "starting", "restoring", "resuming"), ("destroying", "destroyed")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A machine to be made."""

    name: str
    labels: Mapping[str, str]
    env: Mapping[str, str]
    snapshot: str | None
    image: str | None
    #: Processors, memory and disk in GiB; only a machine made from an image can be told.
    size: tuple[int, int, int]
    volumes: Mapping[str, str]
    stop_minutes: int
    archive_minutes: int | None
    delete_at_stop: bool
    addresses: str | None
    domains: str | None

    @property
    def offline(self) -> bool:
        return self.addresses is None and self.domains is None


@dataclass(frozen=True, slots=True)
class PreviewLink:
    """An address outside at which a server on the machine answers; whoever knows the token gets through.

    The token of a signed link is part of its address. Otherwise it is sent as the header `x-daytona-preview-token`.
    """

    url: str
    token: str


class Service:
    """One account with Daytona, through its SDK, which has to be loaded. Close it."""

    def __init__(self, *, key: str | None, url: str | None, target: str | None) -> None:
        from daytona import DaytonaConfig

        with _spoken("set up its client"), warnings.catch_warnings():
            # Otherwise it keeps a connection open to be told of events, whose library takes over the interrupts of
            # this process and answers them by cancelling every task in it. The SDK calls polling deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            config = DaytonaConfig(api_key=key, api_url=url, target=target, use_deprecated_polling=True)
            self._client: AsyncDaytona = _quiet_client()(config)

    async def make(self, wanted: Wanted) -> Machine:
        """Make a machine; one that was begun and did not come is removed again."""
        from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams, Resources, VolumeMount

        mounts = [VolumeMount(volume_id=await self._volume(name), mount_path=at) for name, at in wanted.volumes.items()]
        common: dict[str, Any] = {
            "name": wanted.name,
            "labels": dict(wanted.labels),
            "env_vars": dict(wanted.env),
            "volumes": mounts,
            "public": False,
            "auto_stop_interval": wanted.stop_minutes,
            "auto_archive_interval": wanted.archive_minutes,
            "auto_delete_interval": 0 if wanted.delete_at_stop else -1,
            "network_block_all": wanted.offline,
            "network_allow_list": wanted.addresses,
            "domain_allow_list": wanted.domains,
        }
        params: CreateSandboxFromImageParams | CreateSandboxFromSnapshotParams
        if wanted.image is None:
            params = CreateSandboxFromSnapshotParams(snapshot=wanted.snapshot, **common)
        else:
            cpu, memory, disk = wanted.size
            resources = Resources(cpu=cpu, memory=memory, disk=disk)
            params = CreateSandboxFromImageParams(image=wanted.image, resources=resources, **common)
        try:
            async with _asked("make a machine", within_s=_CHANGE_S):
                return Machine(await self._client.create(params, timeout=_CHANGE_S))
        except (SkepError, asyncio.CancelledError):
            await self._forget(wanted.name)
            raise

    async def get(self, ident: str) -> Machine:
        async with _asked(f"find machine {ident[:80]!r}"):
            return Machine(await self._client.get(ident))

    async def find(self, labels: Mapping[str, str]) -> list[Machine]:
        """Return the machines that have all of the labels."""
        from daytona import ListSandboxesQuery

        async with _asked("list machines"):
            query = ListSandboxesQuery(labels=dict(labels))
            machines = [Machine(sandbox) async for sandbox in self._client.list(query)]
        return [machine for machine in machines if machine.state not in _GONE]

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call] # the SDK says nothing of it

    async def volumes(self) -> list[str]:
        """Return the names of all volumes."""
        async with _asked("list volumes"):
            return [volume.name for volume in await self._client.volume.list()]

    async def _volume(self, name: str) -> str:
        """Return the id of a volume, which is made if it is not there, once it can be mounted."""
        async with _asked(f"get volume {name!r}", within_s=_CHANGE_S):
            volume = await self._client.volume.get(name, create=True)
            while volume.state in ("creating", "pending_create"):
                await asyncio.sleep(_LOOK_S)
                volume = await self._client.volume.get(name)
        if volume.state != "ready":
            raise Unavailable(f"volume {name!r} is {volume.state.value}", hint="look at it in Daytona's dashboard")
        return str(volume.id)

    async def _forget(self, name: str) -> None:
        try:
            await (await self.get(name)).remove()
        except SkepError:
            return  # it never was, or it removes itself when it has been idle


class Machine:
    """One machine of Daytona."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    @property
    def id(self) -> str:
        return str(self._sandbox.id)

    @property
    def state(self) -> str:
        """The state it was in when the service was last asked."""
        state = self._sandbox.state
        return "unknown" if state is None else str(state.value)

    async def look(self) -> None:
        """Learn its state."""
        async with _asked(f"look at machine {self.id}"):
            await self._sandbox.refresh_data()

    @property
    def offline(self) -> bool:
        return bool(self._sandbox.network_block_all)

    @property
    def public(self) -> bool:
        return bool(self._sandbox.public)

    async def awaken(self) -> None:
        """Let it run, from whatever state it can be brought back from."""
        async with _asked(f"let machine {self.id} come to rest", within_s=_CHANGE_S):
            while self.state in _LEAVING:
                await asyncio.sleep(_LOOK_S)
                await self._sandbox.refresh_data()
        if self.state in ("error", "build_failed") and self._sandbox.recoverable:
            async with _asked(f"recover machine {self.id}", within_s=_CHANGE_S):
                await self._sandbox.recover(timeout=_CHANGE_S)
        elif self.state in _AT_REST:
            async with _asked(f"start machine {self.id}", within_s=_CHANGE_S):
                await self._sandbox.start(timeout=_CHANGE_S)
        elif self.state in _COMING:
            async with _asked(f"await machine {self.id}", within_s=_CHANGE_S):
                await self._sandbox.wait_for_sandbox_start(timeout=_CHANGE_S)
        elif self.state != "started":
            reason = f": {self._sandbox.error_reason}" if self._sandbox.error_reason else ""
            raise SandboxLost(
                f"machine {self.id} is {self.state} and cannot be started{reason}"[:_TOLD_CHARS],
                hint="look at it in Daytona's dashboard, or make another",
            )

    async def stop(self) -> None:
        """End its processes; its disk stays, unless it was made to be thrown away."""
        async with _asked(f"stop machine {self.id}", within_s=_CHANGE_S):
            await self._sandbox.stop(timeout=_CHANGE_S)

    async def archive(self) -> None:
        async with _asked(f"archive machine {self.id}", within_s=_CHANGE_S):
            await self._sandbox.archive()

    async def remove(self) -> None:
        async with _asked(f"remove machine {self.id}", within_s=_CHANGE_S):
            await self._sandbox.delete(timeout=_CHANGE_S)

    async def touch(self) -> None:
        """Count as used now."""
        async with _asked(f"keep machine {self.id} awake"):
            await self._sandbox.refresh_activity()

    async def upload(self, files: Mapping[str, bytes]) -> None:
        from daytona import FileUpload

        async with _asked(f"send files to machine {self.id}", within_s=_CHANGE_S):
            await self._sandbox.fs.upload_files([FileUpload(data, path) for path, data in files.items()])

    async def execute(self, command: str) -> tuple[int, str]:
        """Run a command as the machine's own user; return its code and all that it printed."""
        async with _asked(f"run a command on machine {self.id}", within_s=_CHANGE_S):
            ended = await self._sandbox.process.exec(command, timeout=int(_CHANGE_S))
        return ended.exit_code, ended.result

    async def terminal(self, ident: str, hear: Callable[[bytes], Awaitable[None]]) -> Terminal:
        """Open a shell on a terminal; what it prints is heard as it comes."""
        async with _asked(f"open a terminal on machine {self.id}"):
            return Terminal(await self._sandbox.process.create_pty_session(ident, hear, envs=_NO_HISTORY))

    async def terminals(self) -> list[str]:
        async with _asked(f"list the terminals of machine {self.id}"):
            return [session.id for session in await self._sandbox.process.list_pty_sessions()]

    async def close_terminal(self, ident: str) -> None:
        """End a terminal and all that was started on it."""
        async with _asked(f"close a terminal of machine {self.id}"):
            await self._sandbox.process.kill_pty_session(ident)

    async def preview(self, port: int, lasts_s: int | None) -> PreviewLink:
        async with _asked(f"get a preview link of machine {self.id}"):
            if lasts_s is None:
                open_link = await self._sandbox.get_preview_link(port)
                return PreviewLink(open_link.url, open_link.token)
            signed = await self._sandbox.create_signed_preview_url(port, expires_in_seconds=lasts_s)
            return PreviewLink(signed.url, signed.token)


class Terminal:
    """A terminal on a machine, over a WebSocket."""

    def __init__(self, handle: AsyncPtyHandle) -> None:
        self._handle = handle

    async def write(self, data: bytes) -> None:
        from daytona import DaytonaError

        try:
            await self._handle.send_input(data)
        except DaytonaError as error:
            raise SandboxLost("the connection to the machine is gone", hint="start another sandbox") from error

    async def ended(self) -> None:
        """Return when the connection is over."""
        await self._handle.wait()

    async def hang_up(self) -> None:
        await self._handle.disconnect()


def load() -> None:
    """Import the SDK, which takes seconds: elsewhere than in the event loop."""
    try:
        from daytona import AsyncDaytona  # noqa: F401 - the package itself imports nothing before it is asked
    except ImportError as error:
        raise SandboxUnusable(
            "a sandbox on Daytona needs its SDK, which is not installed", hint="pip install 'skep[daytona]'"
        ) from error


def _quiet_client() -> type[AsyncDaytona]:
    from daytona import AsyncDaytona

    class Quiet(AsyncDaytona):
        """The client without its tracing, which a variable or a file in the working folder could switch on."""

        def _init_otel(self, sdk_version: str) -> None:
            """Trace nothing."""

    return Quiet


@contextmanager
def _spoken(doing: str) -> Iterator[None]:
    """Say in Skep's words what went wrong."""
    from daytona import DaytonaError

    try:
        yield
    except DaytonaError as error:
        raise _told(error, doing) from error


@asynccontextmanager
async def _asked(doing: str, *, within_s: float = _ANSWER_S) -> AsyncIterator[None]:
    """Give the service so long to do something, and say in Skep's words what went wrong."""
    try:
        with _spoken(doing):
            async with asyncio.timeout(within_s):
                yield
    except TimeoutError as error:
        raise Unavailable(
            f"Daytona did not {doing} within {within_s:.0f} s", hint="try again; see whether Daytona has an outage"
        ) from error


#: What a status means to whoever asked, and what to do about it. Other ones are the service's own trouble.
_MEANINGS: dict[int, tuple[type[SkepError], str]] = {
    400: (InvalidRequest, "change what is asked of it"),
    401: (Denied, "give a valid key as options={'api_key': …}, or set DAYTONA_API_KEY"),
    403: (Denied, "use a key that may do this, and see whether a limit of the organization is met"),
    404: (NotFound, "list the machines in Daytona's dashboard to see which there are"),
    409: (Conflict, "see what the machine is doing, and try again"),
    410: (SandboxLost, "start another sandbox"),
    422: (InvalidRequest, "change what is asked of it"),
    429: (LimitReached, "wait a little, or ask Daytona for a higher limit"),
}


def _told(error: DaytonaError, doing: str) -> SkepError:
    text = str(error.message)[:_TOLD_CHARS]
    message = f"Daytona did not {doing}: {text}"
    if error.code == "SANDBOX_NOT_RUNNING" or "Is the Sandbox started?" in text:
        return SandboxLost(message, hint="start it again by options={'sandbox_id': …}, or start another sandbox")
    status = error.status_code or (401 if type(error).__name__ == "DaytonaAuthenticationError" else 0)
    kind, hint = _MEANINGS.get(status, (Unavailable, "try again; see whether Daytona has an outage"))
    return kind(message, hint=hint)
