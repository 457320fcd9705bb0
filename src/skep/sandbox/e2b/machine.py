"""The few calls that Skep makes of E2B's SDK, and what it makes of their failures; the SDK is imported here alone."""

from __future__ import annotations

import contextlib
import secrets
import shlex
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from skep.errors import (
    Denied,
    InvalidRequest,
    LimitReached,
    SandboxLost,
    SandboxUnusable,
    SkepError,
    StorageFull,
    Unavailable,
)
from skep.sandbox.binary import native
from skep.sandbox.e2b.network import NOWHERE, names, network, rules
from skep.sandbox.egress.policy import Policy
from skep.sandbox.recipe import Recipe
from skep.sandbox.relay.link import PATIENCE_S, relay_program
from skep.sandbox.stream import twin_program

if TYPE_CHECKING:
    from e2b import AsyncSandbox
    from e2b.sandbox_async.commands.command_handle import AsyncCommandHandle

#: Where root puts what Skep brings along.
_PLACE = "/opt/skep"
_RELAY, _TWIN, FAKEROOT = f"{_PLACE}/relay.py", f"{_PLACE}/twin.py", f"{_PLACE}/fakeroot.so"
_COMMAND = f"exec python3 -IS {_RELAY} {PATIENCE_S:g} python3 -ISu {_TWIN} --home /workspace"
_SETTLE = """
set -e
if ! id agent > /dev/null 2>&1; then useradd --no-create-home --home-dir /workspace --shell /bin/bash agent; fi
mkdir -p /workspace /cache
if [ "$(stat -c %U /workspace)" != agent ]; then chown agent /workspace; chmod 700 /workspace; fi
chown agent /cache
"""

Hear = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Options:
    """What `Sandbox.create(options=…)` says, checked."""

    template: str = "base"
    timeout_s: int = Field(default=300, ge=1)
    keep: bool = False
    sandbox_id: str | None = None
    find: bool = False
    volumes: Mapping[str, str] | None = None
    public: bool = False
    api_key: str | None = Field(default=None, repr=False)
    domain: str | None = None
    api_url: str | None = None
    sandbox_url: str | None = None
    request_timeout_s: float = 30.0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        unknown = given.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise InvalidRequest(
                f"E2B knows no option {min(unknown)!r}", hint=f"use {', '.join(cls.__dataclass_fields__)}"
            )
        try:
            options = TypeAdapter(cls).validate_python(dict(given))
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidRequest(
                f"the option {first['loc'][0]} of E2B is wrong: {first['msg']}", hint="see the options of the mechanism"
            ) from error
        if options.sandbox_id and options.find:
            raise InvalidRequest("a machine is named or found by its labels, not both", hint="leave one of them out")
        if options.volumes and (options.sandbox_id or options.find):
            raise InvalidRequest("volumes are mounted when a machine is made", hint="leave volumes out")
        return options

    @property
    def connection(self) -> dict[str, Any]:
        """What every call of the SDK is told; what is None the SDK finds by itself."""
        return {
            "api_key": self.api_key,
            "domain": self.domain,
            "api_url": self.api_url,
            "sandbox_url": self.sandbox_url,
            "request_timeout": self.request_timeout_s,
        }


class Machine:
    """The few calls that Skep makes of E2B's SDK; what changes there is dealt with here alone."""

    def __init__(self, machine: AsyncSandbox, options: Options) -> None:
        self._machine = machine
        self._options = options
        self.id = machine.sandbox_id

    @classmethod
    async def create(cls, recipe: Recipe, options: Options) -> Machine:
        labels = {**_metadata(recipe.labels), "sandbox": secrets.token_hex(8)}
        try:
            return await cls._create(recipe, options, labels)
        except Unavailable:
            # It may have been made all the same, and only the answer have been lost.
            with contextlib.suppress(SkepError):
                await cls.forget(options, labels=labels)
            raise

    @staticmethod
    async def volumes(options: Options) -> list[str]:
        """Return the names of all volumes."""
        with _told("list volumes"):
            from e2b import AsyncVolume

            return [one.name for one in await AsyncVolume.list(**options.connection)]

    @classmethod
    async def _make_volumes(cls, wanted: Iterable[str], options: Options) -> None:
        """Make the volumes that are not there."""
        missing = set(wanted).difference(await cls.volumes(options))
        with _told("make a volume"):
            from e2b import AsyncVolume

            for name in sorted(missing):
                await AsyncVolume.create(name, **options.connection)

    @classmethod
    async def _create(cls, recipe: Recipe, options: Options, labels: Mapping[str, str]) -> Machine:
        if options.volumes:
            await cls._make_volumes(options.volumes.values(), options)
        with _told("make a machine"):
            from e2b import AsyncSandbox

            made = await AsyncSandbox.create(
                options.template,
                timeout=options.timeout_s,
                metadata=dict(labels),
                envs=dict(recipe.env),
                allow_internet_access=recipe.network is not None,
                network=cast(Any, network(recipe, public=options.public)),
                lifecycle={"on_timeout": "pause" if options.keep else "kill", "auto_resume": False},
                volume_mounts=dict(options.volumes) if options.volumes else None,
                **options.connection,
            )
        return cls(made, options)

    @classmethod
    async def connect(cls, sandbox_id: str, options: Options) -> Machine:
        """Use a machine that is there; a halted one goes on."""
        with _told("use a machine"):
            from e2b import AsyncSandbox

            made = await AsyncSandbox.connect(sandbox_id, timeout=options.timeout_s, **options.connection)
        return cls(made, options)

    @staticmethod
    async def find(labels: Mapping[str, str], options: Options) -> list[str]:
        """Return the ids of the machines that Skep made with these labels, halted or not."""
        with _told("look for machines"):
            from e2b import AsyncSandbox, SandboxQuery

            pages = AsyncSandbox.list(SandboxQuery(metadata=_metadata(labels)), **options.connection)
            found: list[str] = []
            while pages.has_next:
                found += [one.sandbox_id for one in await pages.next_items()]
            return found

    @classmethod
    async def forget(cls, options: Options, *, machine: str | None = None, labels: Mapping[str, str]) -> None:
        """End a machine by its id, or all that have these labels."""
        for sandbox_id in [machine] if machine else await cls.find(labels, options):
            with _told("end a machine"):
                from e2b import AsyncSandbox

                await AsyncSandbox.kill(sandbox_id, **options.connection)

    async def prepare(self, *, names: list[str]) -> None:
        """Bring what is needed and let root arrange it, whatever was here before."""
        with _told("prepare a machine"):
            await self._upload()
            await self._machine.commands.run(_SETTLE + (_known(names) if names else ""), user="root")

    async def take_over(self, recipe: Recipe) -> None:
        """Make a machine that was here before as a new one would be; what other controllers run there is ended."""
        with _told("take a machine over"):
            found = (await self._machine.get_info()).network or {}
            if found.get("allow_public_traffic", True) and not self._options.public:
                raise InvalidRequest(
                    f"everybody may visit the ports of machine {self.id}", hint="pass the option public, or a new one"
                )
            await self._machine.update_network(cast(Any, rules(recipe.network.policy if recipe.network else None)))
            # A relay ends with all that its twin has started.
            for one in await self._machine.commands.list():
                if any(_RELAY in argument for argument in one.args):
                    await self._machine.commands.kill(one.pid)

    async def _upload(self) -> None:
        await self._machine.files.write_files(
            [
                {"path": _RELAY, "data": relay_program()},
                {"path": _TWIN, "data": twin_program()},
                {"path": FAKEROOT, "data": native("skep-fakeroot.so").read_bytes()},
            ],
            user="root",
        )

    async def spawn(self, hear: Hear) -> AsyncCommandHandle[Any]:
        with _told("start the twin"):
            return await self._machine.commands.run(
                _COMMAND, background=True, stdin=True, user="agent", cwd="/", timeout=0,
                on_stdout=hear, retain_output=False,
            )  # fmt: skip

    async def attach(self, pid: int, hear: Hear) -> AsyncCommandHandle[Any]:
        with _told("reach the twin"):
            return await self._machine.commands.connect(pid, timeout=0, on_stdout=hear, retain_output=False)

    async def send(self, pid: int, data: bytes) -> None:
        with _told("talk to the twin"):
            await self._machine.commands.send_stdin(pid, data)

    async def running(self) -> bool:
        with _told("ask for a machine"):
            return await self._machine.is_running()

    async def exists(self) -> bool:
        with _told("ask for a machine"):
            return bool(await self._machine.get_info())

    async def extend(self) -> None:
        with _told("keep a machine"):
            await self._machine.set_timeout(self._options.timeout_s)

    async def pause(self) -> None:
        with _told("pause a machine"):
            await self._machine.pause()

    async def wake(self) -> None:
        with _told("wake a machine"):
            await self._machine.connect(timeout=self._options.timeout_s)

    async def kill(self) -> None:
        with _told("end a machine"):
            await self._machine.kill()

    async def restrict(self, policy: Policy) -> None:
        said = rules(policy)
        with _told("change the network of a machine"):
            await self._machine.update_network(cast(Any, said))
            await self._machine.commands.run(_known(names(policy)), user="root")

    def address(self, port: int) -> tuple[str, dict[str, str]]:
        token = self._machine.traffic_access_token
        return self._machine.get_host(port), {"e2b-traffic-access-token": token} if token else {}


def _known(names: list[str]) -> str:
    """Return the commands with which root lets a machine know these names, and none that it knew from here before."""
    lines = "".join(f"echo {NOWHERE} {shlex.quote(name)}; " for name in names)
    draft = f"{_PLACE}/hosts"
    return f"{{ grep -v '^{NOWHERE} ' /etc/hosts; {lines}}} > {draft} && cat {draft} > /etc/hosts"


def _metadata(labels: Mapping[str, str]) -> dict[str, str]:
    return {"made_by": "skep", **labels}


@contextlib.contextmanager
def _told(doing: str) -> Iterator[None]:
    """Tell what the SDK raises as Skep does."""
    try:
        import e2b  # noqa: F401
    except ImportError as error:
        raise SandboxUnusable("the mechanism e2b needs the SDK of E2B", hint="pip install 'skep[e2b]'") from error
    try:
        yield
    except SkepError:
        raise
    except Exception as error:  # the SDK raises bare ones too, and whatever an answer that it cannot read leads to
        raise _translated(error, doing) from error


def _translated(error: Exception, doing: str) -> SkepError:
    from e2b import exceptions as sdk
    from e2b.sandbox.commands.command_handle import CommandExitException

    said = " ".join(str(error).split())[:300]
    match error:
        case sdk.AuthenticationException():
            return Denied(f"E2B refused to {doing}: {said}", hint="set E2B_API_KEY to a key of your account")
        case sdk.RateLimitException():
            return LimitReached(f"E2B refused to {doing}: {said}", hint="wait a little, or end machines you do not use")
        case sdk.SandboxNotRunningException() | sdk.NotFoundException():
            return SandboxLost(f"cannot {doing}: {said}", hint="resolve the session or create a new sandbox")
        case sdk.NotEnoughSpaceException():
            return StorageFull(f"cannot {doing}: {said}", hint="use a template with a larger disk")
        case CommandExitException():
            said = " ".join(error.stderr.split())[-300:]
            return SandboxUnusable(f"cannot {doing}: {said}", hint="use a template with bash, useradd and Python 3.9")
        case sdk.InvalidArgumentException() | sdk.TemplateException():
            return InvalidRequest(f"E2B refused to {doing}: {said}", hint="see the options of the mechanism")
        case sdk.SandboxException(status_code=int(status)) if 400 <= status < 500:
            return InvalidRequest(f"E2B refused to {doing}: {said}", hint="see the template and the options")
        case _:
            return Unavailable(f"cannot {doing}: {said or type(error).__name__}", hint="try again; is E2B up?")
