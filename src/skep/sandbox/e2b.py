"""E2B: a virtual machine in its cloud, reached through its SDK.

A machine is made with no way out and closed to visitors, root on it makes the user `agent`, and a twin is started
there behind a relay; from then on commands, files and connections go over that one stream, and E2B's own interface is
used only for the life of the machine: pausing, waking, and putting off the hour at which it stops by itself.

What E2B may be told with `options`:

- `template`: what the machine is made from (`base`); it needs bash and Python 3.9 or newer
- `timeout_s`: after how long without work it stops by itself (300)
- `keep`: stop by pausing the machine instead of ending it, so that it can be found again
- `sandbox_id`: use this machine, halted or not, instead of a new one; what another controller runs there is ended
- `find`: use the one machine that has the recipe's labels, instead of a new one
- `volumes`: E2B's own volumes, path inside to name
- `public`: let everybody reach the ports of the machine who knows its address
- `api_key`, `domain`, `api_url`, `sandbox_url`, `request_timeout_s`: how E2B is reached, if not as its SDK finds it
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from skep.errors import (
    Conflict,
    Denied,
    InvalidRequest,
    LimitReached,
    NotFound,
    SandboxLost,
    SandboxUnusable,
    SkepError,
    StorageFull,
    Unavailable,
)
from skep.sandbox.binary import native
from skep.sandbox.egress.policy import DEFAULT_PORTS, Policy, Traffic
from skep.sandbox.link import Housing
from skep.sandbox.recipe import Recipe
from skep.sandbox.relay.link import PATIENCE_S, Line, RelayedLink, relay_program
from skep.sandbox.stream import StreamSandbox, twin_program
from skep.sandbox.twin.conversation import Conversation
from skep.sandbox.twin.files import TwinFiles, count

if TYPE_CHECKING:
    from e2b import AsyncSandbox
    from e2b.sandbox_async.commands.command_handle import AsyncCommandHandle

#: Where root puts what Skep brings along.
_PLACE = "/opt/skep"
_RELAY, _TWIN, _FAKEROOT = f"{_PLACE}/relay.py", f"{_PLACE}/twin.py", f"{_PLACE}/fakeroot.so"
_COMMAND = f"exec python3 -I {_RELAY} {PATIENCE_S:g} python3 -I -u {_TWIN} --home /workspace"
_SETTLE = """
set -e
if ! id agent > /dev/null 2>&1; then useradd --no-create-home --home-dir /workspace --shell /bin/bash agent; fi
mkdir -p /workspace /cache
chown agent /workspace /cache
chmod 700 /workspace
python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))'
"""
#: An address that leads nowhere: E2B lets connections out by the name they are for, whatever address they go to.
_NOWHERE = "198.18.0.1"
_ALL = "0.0.0.0/0"
#: How long a connection that was lost is tried for again while nobody says that the machine is gone.
_RECONNECT_S = 30.0
_REST_S = 0.2
_AHEAD = 8


@dataclass(frozen=True, slots=True)
class Options:
    """What `Sandbox.create(options=…)` says, checked."""

    template: str = "base"
    timeout_s: int = 300
    keep: bool = False
    sandbox_id: str | None = None
    find: bool = False
    volumes: Mapping[str, str] | None = None
    public: bool = False
    api_key: str | None = None
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
        options = cls(**given)
        if options.sandbox_id and options.find:
            raise InvalidRequest("a machine is named or found by its labels, not both", hint="leave one of them out")
        if options.timeout_s < 1:
            raise InvalidRequest("a machine cannot stop before it starts", hint="let timeout_s be 1 or more")
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
        with _told("make a machine"):
            from e2b import AsyncSandbox

            made = await AsyncSandbox.create(
                options.template,
                timeout=options.timeout_s,
                metadata={**_metadata(recipe), "sandbox": secrets.token_hex(8)},
                envs=dict(recipe.env),
                allow_internet_access=recipe.network is not None,
                network=cast(Any, _network(recipe, public=options.public)),
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
    async def find(recipe: Recipe, options: Options) -> list[str]:
        """Return the ids of the machines with the recipe's labels, halted or not."""
        with _told("look for machines"):
            from e2b import AsyncSandbox, SandboxQuery

            pages = AsyncSandbox.list(SandboxQuery(metadata=_metadata(recipe)), **options.connection)
            found: list[str] = []
            while pages.has_next:
                found += [one.sandbox_id for one in await pages.next_items()]
            return found

    async def prepare(self, *, hosts: list[str]) -> None:
        """Bring what is needed and let root arrange it, whatever was here before."""
        names = "".join(f"\necho {_NOWHERE} {shlex.quote(host)} >> /etc/hosts" for host in hosts)
        with _told("prepare a machine"):
            await asyncio.gather(self._upload(), self._machine.commands.run(_SETTLE + names, user="root"))
            for one in await self._machine.commands.list():
                if any(_RELAY in argument for argument in one.args):
                    await self._machine.commands.kill(one.pid)

    async def _upload(self) -> None:
        await self._machine.files.write_files(
            [
                {"path": _RELAY, "data": relay_program()},
                {"path": _TWIN, "data": twin_program()},
                {"path": _FAKEROOT, "data": native("skep-fakeroot.so").read_bytes()},
            ],
            user="root",
        )

    async def spawn(self, command: str, hear: Callable[[str], Awaitable[None]]) -> AsyncCommandHandle[Any]:
        with _told("start the twin"):
            return await self._machine.commands.run(
                command, background=True, stdin=True, user="agent", cwd="/", timeout=0,
                on_stdout=hear, retain_output=False,
            )  # fmt: skip

    async def attach(self, pid: int, hear: Callable[[str], Awaitable[None]]) -> AsyncCommandHandle[Any]:
        with _told("reach the twin"):
            return await self._machine.commands.connect(pid, timeout=0, on_stdout=hear, retain_output=False)

    async def send(self, pid: int, data: bytes) -> None:
        with _told("talk to the twin"):
            await self._machine.commands.send_stdin(pid, data)

    async def running(self) -> bool:
        with _told("ask for a machine"):
            return await self._machine.is_running()

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
        with _told("change the network of a machine"):
            await self._machine.update_network(cast(Any, _rules(policy)))
            names = "".join(f"{_NOWHERE} {host}\n" for host in _hosts(policy))
            await self._machine.files.write("/etc/hosts", f"127.0.0.1 localhost\n{names}", user="root")

    def address(self, port: int) -> tuple[str, dict[str, str]]:
        token = self._machine.traffic_access_token
        return self._machine.get_host(port), {"e2b-traffic-access-token": token} if token else {}


class MachineLine(Line):
    """The standard input and output of the relay, by E2B's interface for processes."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._pid = 0
        self._handle: AsyncCommandHandle[Any] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(_AHEAD)

    async def open(self) -> None:
        if not self._pid:
            self._handle = await self._machine.spawn(_COMMAND, self._hear)
            self._pid = self._handle.pid
        else:
            await self._let_go()
            self._handle = await self._attached()
        self._ending = asyncio.ensure_future(self._await_end(self._handle))

    async def read(self) -> bytes:
        return await self._pieces.get()

    async def write(self, data: bytes) -> None:
        try:
            await self._machine.send(self._pid, data)
        except SandboxLost:
            raise
        except SkepError as error:
            raise ConnectionError(error.message) from error

    async def close(self) -> None:
        await self._let_go()
        self._cut()

    async def _hear(self, text: str) -> None:
        await self._pieces.put(text.encode())

    async def _attached(self) -> AsyncCommandHandle[Any]:
        deadline = asyncio.get_running_loop().time() + _RECONNECT_S
        while True:
            try:
                return await self._machine.attach(self._pid, self._hear)
            except SandboxLost:
                raise
            except SkepError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise SandboxLost(f"the machine cannot be reached: {error.message}", hint=error.hint) from error
                await asyncio.sleep(_REST_S)

    async def _await_end(self, handle: AsyncCommandHandle[Any]) -> None:
        with contextlib.suppress(*_sdk_errors()):
            await handle.wait()
        self._cut()

    def _cut(self) -> None:
        """Let the reader know; what has not been read yet is said again over the next connection."""
        while not self._pieces.empty():
            self._pieces.get_nowait()
        self._pieces.put_nowait(b"")

    async def _let_go(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._handle is not None:
            handle, self._handle = self._handle, None
            await handle.disconnect()


class E2BHousing(Housing):
    """The machine around a twin."""

    def __init__(self, machine: Machine, link: RelayedLink, options: Options) -> None:
        self.id = machine.id
        self.machine = machine
        self.options = options
        self.paused = False
        self._link = link

    async def alive(self) -> bool:
        try:
            return self.paused or await self.machine.running()
        except SandboxLost:
            return False
        except SkepError:
            return True  # nobody says that it is gone

    async def pause(self) -> bool:
        if not self.paused:
            try:
                await self._link.rest()
            except ConnectionError as error:
                raise Unavailable(f"the machine cannot be reached: {error}", hint="try again") from error
            self.paused = True
            await self.machine.pause()
        return True

    async def resume(self) -> bool:
        if self.paused:
            await self.machine.wake()
            await self._link.wake()
            self.paused = False
        return True

    async def end(self) -> None:
        with contextlib.suppress(SandboxLost, NotFound):
            if not self.options.keep:
                await self.machine.kill()
            elif not self.paused:
                await self.machine.pause()


class E2BSandbox(StreamSandbox):
    """A sandbox on a machine of E2B. Its `id` is E2B's own, with which the machine can be used again.

    `pause` halts the whole machine, memory and all: until `resume` there is nobody who could read a file or end a
    command whose time is up, and every call is a `Conflict`. A machine on which nothing has run and of which nothing
    was asked for `timeout_s` stops by itself.
    """

    mechanism: ClassVar[str] = "e2b"

    def __init__(self, conversation: Conversation, housing: Housing, recipe: Recipe, **others: Any) -> None:
        super().__init__(conversation, housing, recipe, **others)
        assert isinstance(housing, E2BHousing)
        self._house = housing
        self._networked = recipe.network is not None
        self._awake = _Awake(conversation, housing)
        self._conversation = cast(Conversation, self._awake)
        self.files = TwinFiles(self._conversation)
        # The relay notices by itself that a machine is gone, at less cost than by asking the twin all the time.
        self._watching.cancel()
        self._watching = asyncio.create_task(self._keep())

    def preview(self, port: int) -> tuple[str, dict[str, str]]:
        """Return where E2B serves a port of the machine by HTTPS, and the headers that it asks for.

        Without the headers nobody gets in, unless the machine was made with the option `public`.
        """
        host, headers = self._house.machine.address(port)
        return f"https://{host}", headers

    async def set_policy(self, policy: Policy) -> None:
        if not self._networked:
            await super().set_policy(policy)
        _rules(policy)
        await self._house.machine.restrict(policy)

    async def _keep(self) -> None:
        """Put off the hour at which the machine stops, for as long as it is used."""
        period_s = self._house.options.timeout_s / 3
        while not self._awake.lost.is_set():
            await asyncio.sleep(period_s)
            with contextlib.suppress(Unavailable, LimitReached, Conflict):  # the next turn comes soon enough
                if self._awake.used or await count(self._awake.conversation) > 0:
                    await self._house.machine.extend()
                    self._awake.used = False


class _Awake:
    """A conversation, refused while the machine is halted: there is nobody who could answer."""

    def __init__(self, conversation: Conversation, housing: E2BHousing) -> None:
        self.conversation = conversation
        self._housing = housing
        self.lost = conversation.lost
        self.used = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.conversation, name)

    def open(self, party: Any) -> int:
        self._require()
        return self.conversation.open(party)

    async def ask(self, kind: int, payload: bytes = b"") -> Any:
        self._require()
        return await self.conversation.ask(kind, payload)

    def _require(self) -> None:
        self.used = True
        if self._housing.paused and not self.conversation.lost.is_set():
            raise Conflict(f"the machine {self._housing.id} is paused", hint="resume the sandbox first")


async def start(recipe: Recipe) -> E2BSandbox:
    """Start a sandbox with this mechanism."""
    options = Options.read(recipe.options)
    _refuse(recipe)
    machine, ours = await _machine(recipe, options)
    line = MachineLine(machine)
    try:
        await machine.prepare(hosts=_hosts(recipe.network.policy) if recipe.network else [])
        await line.open()
    except BaseException:
        if ours:
            with contextlib.suppress(SkepError):
                await machine.kill()
        raise
    link = RelayedLink(line)
    return await E2BSandbox.over(link, E2BHousing(machine, link, options), recipe, fakeroot=_FAKEROOT)


async def _machine(recipe: Recipe, options: Options) -> tuple[Machine, bool]:
    """Return the machine to use, and whether it was made for this."""
    if options.sandbox_id is None and not options.find:
        return await Machine.create(recipe, options), True
    wanted = options.sandbox_id or await _found(recipe, options)
    try:
        return await Machine.connect(wanted, options), False
    except SandboxLost as error:
        raise NotFound(
            f"there is no machine {wanted!r} at E2B any more", hint="create another sandbox, without sandbox_id"
        ) from error


async def _found(recipe: Recipe, options: Options) -> str:
    if not recipe.labels:
        raise InvalidRequest("a machine is found by its labels, and there are none", hint="pass labels= or sandbox_id")
    found = await Machine.find(recipe, options)
    if not found:
        raise NotFound("no machine at E2B has these labels", hint="create another sandbox, without the option find")
    if len(found) > 1:
        raise Conflict(f"machines {', '.join(found[:5])} have these labels", hint="name one of them with sandbox_id")
    return found[0]


def _refuse(recipe: Recipe) -> None:
    """Refuse what cannot be done on another machine, rather than do less."""
    asked = {
        "folder": recipe.folder is not None,
        "stack": recipe.stack is not None,
        "mounts": bool(recipe.mounts),
        "read_only": bool(recipe.read_only),
    }
    for name, given in asked.items():
        if given:
            raise InvalidRequest(
                f"a machine of E2B cannot show a folder of this one, so {name} is refused",
                hint="copy files in with sandbox.files, or use another mechanism",
            )
    if recipe.network is not None:
        if recipe.network.secrets:
            raise InvalidRequest("E2B cannot put secrets in on the way", hint="use another mechanism for them")
        _rules(recipe.network.policy)


def _metadata(recipe: Recipe) -> dict[str, str]:
    return {"made_by": "skep", **recipe.labels}


def _network(recipe: Recipe, *, public: bool) -> dict[str, Any]:
    rules = {"deny_out": [_ALL]} if recipe.network is None else _rules(recipe.network.policy)
    return {**rules, "allow_public_traffic": public}


def _rules(policy: Policy) -> dict[str, Any]:
    """Say a policy in E2B's words, or refuse what they cannot say: what is let out is a name on ports 80 and 443.

    No name server is let out, or anything could leave in questions to it: the names are in the machine's own list.
    """
    hint = "allow whole host names on their usual ports, or use another mechanism"
    for rule in policy.rules:
        if rule.below:
            raise InvalidRequest(f"E2B cannot let {rule} out without a name server, which lets out more", hint=hint)
        if rule.ports != DEFAULT_PORTS:
            raise InvalidRequest(f"E2B cannot hold {rule} to its ports", hint=hint)
    if policy.upstreams or policy.traffic != Traffic():
        raise InvalidRequest("E2B cannot pin hosts or count traffic", hint="leave upstreams and traffic out")
    return {"allow_out": _hosts(policy), "deny_out": [_ALL], "dns_servers": []}


def _hosts(policy: Policy) -> list[str]:
    return [rule.host for rule in policy.rules]


@contextlib.contextmanager
def _told(doing: str) -> Iterator[None]:
    """Tell what the SDK raises as Skep does."""
    try:
        import e2b  # noqa: F401
    except ImportError as error:
        raise SandboxUnusable("the mechanism e2b needs the SDK of E2B", hint="pip install 'skep[e2b]'") from error
    try:
        yield
    except _sdk_errors() as error:
        raise _translated(error, doing) from error


def _sdk_errors() -> tuple[type[Exception], ...]:
    """Return everything that a call of the SDK may raise; an answer that it cannot read is a `ValueError` or worse."""
    import httpx
    from connectrpc.errors import ConnectError
    from e2b.exceptions import AuthenticationException, SandboxException, ServiceBusyException

    known = (SandboxException, AuthenticationException, ServiceBusyException, ConnectError, httpx.HTTPError)
    return (*known, OSError, ValueError, KeyError, TypeError)


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
