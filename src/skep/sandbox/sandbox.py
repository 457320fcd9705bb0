"""The contract of a sandbox: what every mechanism promises, and what is built on top once for all of them.

For whoever writes the next mechanism
-------------------------------------
Subclass `Sandbox` and provide `start`, `files`, `alive`, `pause`, `resume`, `kill_all` and `stop`; everything else
(`run`, background jobs, the persistent shell) is built here from those. Offer `start(recipe)` in the module, name the
module in `creation.py`, and run `skep.testing.SandboxContract` against it.

The promises:

- A program that fails is a value: `Execution` or `Exit` with its code or signal. A sandbox that is lost is the
  exception `SandboxLost`, raised by every call that was waiting, within two seconds of its death.
- Output streams are pulled. Nothing is read before the caller asks, so an endless program cannot fill memory.
- Every started process leads a process group of its own; `kill` reaches all of the group.
- What a program did that a limit stopped is said: `limit` names it.
- A path that is not absolute is below `/workspace`. Paths are those seen from inside.
- The user is `agent` (not root) unless `root` is asked for; that root is fake: it looks like uid 0 to programs,
  and holds no privilege.
- When the controlling process dies, by whatever means, everything inside dies within two seconds.
"""

from __future__ import annotations

import abc
import asyncio
import os
import signal as signals
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from skep.errors import InvalidRequest, NotFound
from skep.sandbox.files import Files
from skep.sandbox.limits import CommandLimits, LimitName, Limits
from skep.sandbox.log import Log

if TYPE_CHECKING:
    from skep.sandbox.creation import Creation
    from skep.sandbox.egress.network import Network
    from skep.sandbox.egress.policy import Policy
    from skep.sandbox.ports import Bounds, Exposure
    from skep.sandbox.shell import Shell
    from skep.sandbox.stack import Mount, Stack

Command = str | Sequence[str]
User = Literal["agent", "root"]


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a terminal in characters."""

    rows: int = 24
    columns: int = 80

    def __post_init__(self) -> None:
        if not (0 <= self.rows < 65536 and 0 <= self.columns < 65536):
            raise InvalidRequest(
                f"a terminal cannot have {self.rows} rows and {self.columns} columns", hint="use numbers below 65536"
            )


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: by itself with a code, or by a signal; and the limit that ended it, if one did."""

    code: int | None
    signal: int | None = None
    limit: LimitName | None = None
    cpu_s: float = 0.0
    peak_bytes: int = 0

    @property
    def status(self) -> int:
        """The code as a shell reports it: 128 and the signal's number for a process that was killed."""
        return self.code if self.code is not None else 128 + (self.signal or 0)


@dataclass(frozen=True, slots=True)
class Execution:
    """A command that has ended, with what it printed."""

    exit: Exit
    stdout: bytes
    stderr: bytes
    duration_s: float
    #: Output beyond `Limits.output_bytes` of a stream was read and thrown away, all but its last words.
    truncated: bool = False
    #: The last of what was left out of each stream, at most 16 KiB.
    stdout_end: bytes = b""
    stderr_end: bytes = b""

    @property
    def exit_code(self) -> int:
        return self.exit.status

    @property
    def ok(self) -> bool:
        return self.exit.code == 0

    @property
    def limit(self) -> LimitName | None:
        return self.exit.limit or ("output" if self.truncated else None)

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        """Standard error as text; bytes that are not UTF-8 are replaced."""
        return self.stderr.decode(errors="replace")


class Stream(abc.ABC):
    """Bytes from a process, pulled by the reader."""

    @abc.abstractmethod
    async def read(self) -> bytes:
        """Return the next bytes as soon as there are any; nothing at the end."""

    @abc.abstractmethod
    def read_now(self) -> bytes:
        """Return what is already there without waiting; nothing if there is nothing yet, or no more."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self.read():
            yield chunk


class Process(abc.ABC):
    """A process in a sandbox, the leader of its own group. With a terminal, `stdout` carries everything."""

    id: str
    pid: int
    argv: Sequence[str]
    stdout: Stream
    stderr: Stream
    exit: Exit | None = None
    #: The controller's end, not blocking, of the socket that the process has as standard input, if it was started so.
    channel: socket.socket | None = None

    @abc.abstractmethod
    async def wait(self) -> Exit:
        """Return how the process ended; raise `SandboxLost` if its sandbox went first."""

    @abc.abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to its standard input. Bytes for a process that has stopped reading are dropped."""

    @abc.abstractmethod
    async def close_stdin(self) -> None:
        """End its standard input: on a pipe it sees the end of file, on a terminal Ctrl-D is typed."""

    @abc.abstractmethod
    async def signal(self, number: int, *, group: bool = True) -> None:
        """Send a signal to the process and, unless told otherwise, its group. A process that has ended is left."""

    @abc.abstractmethod
    async def resize(self, size: Size) -> None:
        """Tell its terminal the new size."""

    @abc.abstractmethod
    def release(self) -> None:
        """Close the controller's ends of its pipes. The process itself goes on."""

    async def kill(self) -> None:
        """End the whole group at once."""
        await self.signal(signals.SIGKILL)


@dataclass(slots=True)
class Job:
    """A background process whose output is kept, bounded, for whoever attaches later."""

    process: Process
    log: Log
    started_at: float
    _pumps: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.process.id

    @property
    def running(self) -> bool:
        return self.process.exit is None

    async def wait(self) -> Exit:
        return await self.process.wait()

    async def kill(self) -> None:
        await self.process.kill()

    def abandon(self) -> None:
        """Read its output no further; whoever is attached comes to the end."""
        for pump in self._pumps:
            pump.cancel()

    async def attach(self, cursor: int = 0) -> AsyncIterator[bytes]:
        """Yield the output from a cursor on, what is kept first and then live, to the end."""
        async for chunk in self.log.follow(cursor):
            yield chunk


class Sandbox(abc.ABC):
    """A private computer. Make one with `Sandbox.create`."""

    mechanism: ClassVar[str]
    id: str
    limits: Limits
    files: Files
    #: Where a command inside finds the workspace, room for what may be lost, and the kernels of the interpreter.
    home: str = "/workspace"
    cache: str = "/cache"
    kernels: str = "/run/skep/kernels"

    @staticmethod
    def create(  # noqa: PLR0913 - each is a thing that callers name
        folder: str | os.PathLike[str] | None = None,
        *,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        read_only: Mapping[str, str] | None = None,
        adopt: bool = False,
        stack: Stack | None = None,
        mounts: Sequence[Mount] = (),
        network: Network | None = None,
        mechanism: str = "bubblewrap",
        labels: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Creation:
        """Make a sandbox, for `async with`, `with` or `await`.

        `folder` is the workspace on the host; without one the workspace is thrown away at the end. `read_only` shows
        more of the host: its path there to the path inside. `adopt` hands the files of a folder that is not empty
        over to the sandbox's own user, which is needed once when Skep runs as root. `stack` is a workspace in layers,
        instead of a folder; `mounts` are more folders, also below /workspace. `network` says what may be reached;
        without it nothing can. `mechanism` is what isolates it, `options` are that one's own, and `labels` say whose
        it is, for mechanisms whose sandboxes others can list.
        """
        from skep.sandbox.creation import Creation
        from skep.sandbox.recipe import Recipe

        if folder is not None and stack is not None:
            raise InvalidRequest("a workspace is a folder or a stack of them", hint="give one of the two")
        recipe = Recipe(
            folder=None if folder is None else os.fspath(folder),
            limits=limits or Limits(),
            env=env or {},
            read_only=read_only or {},
            adopt=adopt,
            stack=stack,
            mounts=tuple(mounts),
            network=network,
            mechanism=mechanism,
            labels=labels or {},
            options=options or {},
        )
        return Creation(recipe)

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    @abc.abstractmethod
    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User = "agent",
        stdin: bool = False,
        channel: bool = False,
        terminal: Size | None = None,
        timeout_s: float | None = None,
        limits: CommandLimits | None = None,
    ) -> Process:
        """Start a command and return at once; a text is run by the shell, a list is run as it is.

        Its standard input is empty, a pipe (`stdin`), a socket for both directions (`channel`), or a terminal.

        A command that cannot be started (not found, not executable, no such folder) is `InvalidRequest`.
        """

    @abc.abstractmethod
    async def alive(self) -> bool:
        """Say whether commands can still run in it."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """End everything inside and free what the sandbox held. Safe to repeat; the workspace stays."""

    @abc.abstractmethod
    async def pause(self) -> None:
        """Halt every process inside until `resume`."""

    @abc.abstractmethod
    async def resume(self) -> None:
        """Let halted processes go on."""

    @abc.abstractmethod
    async def kill_all(self) -> None:
        """End every process inside at once, daemons and fork bombs too. The sandbox itself goes on."""

    async def end_marked(self, run: str, *, within_s: float = 1.5) -> bool:
        """End every process inside that is a run's, daemons too, and nothing else; say whether none is left.

        They are known by the `SKEP_IDEMPOTENCY_KEY` that they began with: the run's name, then `.` or `:` and more. One
        that has cleared its environment is not found. A mechanism that cannot look ends nothing.
        """
        return False

    async def occupied(self) -> bool:
        """Say whether anything runs inside, or another process uses it."""
        return any(job.running for job in self._jobs.values())

    async def set_policy(self, policy: Policy) -> None:
        """Change what a running sandbox may reach, if it was made with a network."""
        raise InvalidRequest(f"sandbox {self.id} was made without a network", hint="pass network= when creating it")

    async def restack(self, stack: Stack) -> None:
        """Lay another stack under /workspace while nothing runs inside; with a process inside it is `WorkspaceBusy`."""
        raise InvalidRequest(f"a {self.mechanism} sandbox keeps its workspace", hint="stop it and start another")

    async def admit(self) -> socket.socket:
        """Take another process in: return a connection to hand to it, with which `joining.join` makes a sandbox there.

        It may run commands and work on files until it hangs up, which ends what it has started.
        """
        raise InvalidRequest(f"a {self.mechanism} sandbox cannot be joined", hint="use another mechanism")

    def introduction(self) -> dict[str, Any]:
        """Return what a process that joins has to know, for JSON."""
        raise InvalidRequest(f"a {self.mechanism} sandbox cannot be joined", hint="use another mechanism")

    @property
    def guests(self) -> int:
        """How many other processes use the sandbox."""
        return 0

    async def alone(self) -> None:  # noqa: B027 - who takes nobody in is always alone
        """Return when no other process uses the sandbox."""

    async def gone(self) -> None:
        """Return when the sandbox is no more, however it went."""
        while await self.alive():  # noqa: ASYNC110 - a mechanism that can be told of it does better
            await asyncio.sleep(_LOOK_S)

    async def connect(self, port: int) -> socket.socket:
        """Connect to a server that listens inside, on loopback; the socket does not block.

        A port on which nobody listens is `NotFound`.
        """
        raise InvalidRequest(f"a {self.mechanism} sandbox hands out no connections", hint="use another mechanism")

    async def expose(self, port: int, *, at: str = "127.0.0.1:0", bounds: Bounds | None = None) -> Exposure:
        """Make a server inside reachable from this machine, for whoever holds the exposure's token.

        `at` is a loopback address and port (0 for any that is free), the path of a unix socket in a private folder,
        or `unix` for a socket in a folder of its own. The exposure ends with the sandbox.
        """
        from skep.sandbox.ports import Exposure

        return await Exposure.open(self, port, at=at, bounds=bounds)

    async def run(
        self,
        command: Command,
        *,
        input: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User = "agent",
        timeout_s: float | None = None,
        limits: CommandLimits | None = None,
    ) -> Execution:
        """Run a command to its end and return what it printed, at most `limits.output_bytes` of each stream.

        Processes it leaves in the background go on; their later output is not waited for.
        """
        began = time.monotonic()
        process = await self.start(
            command,
            cwd=cwd,
            env=env,
            user=user,
            stdin=bool(input),
            timeout_s=self.limits.time_for(timeout_s),
            limits=limits,
        )
        try:
            return await _gather(process, input, began=began, keep=self.limits.output_bytes)
        except asyncio.CancelledError:
            await process.kill()
            raise
        finally:
            process.release()

    async def background(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User = "agent",
    ) -> Job:
        """Start a command that outlives this call, keeping its output for whoever attaches."""
        process = await self.start(command, cwd=cwd, env=env, user=user)
        job = Job(process, Log(), started_at=time.time())
        job._pumps.append(asyncio.create_task(_pump(process, job.log)))
        self._jobs[job.id] = job
        return job

    def jobs(self) -> list[Job]:
        """List the background jobs, oldest first, ended ones too."""
        return list(self._jobs.values())

    def job(self, job_id: str) -> Job:
        """Return one background job by its id."""
        if job_id not in self._jobs:
            raise NotFound(f"no background job {job_id!r}", hint="list them to see which there are")
        return self._jobs[job_id]

    def forget(self, job_id: str) -> None:
        """Drop an ended job and its log."""
        if self.job(job_id).running:
            raise InvalidRequest(f"job {job_id!r} is still running", hint="kill it first")
        del self._jobs[job_id]

    async def shell(self, *, user: User = "agent") -> Shell:
        """Open a shell whose folder, variables and functions last from one command to the next."""
        from skep.sandbox.shell import Shell

        return await Shell.open(self, user=user)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


#: How often a sandbox that cannot tell is asked whether it lives.
_LOOK_S = 0.5
#: How much is kept of the end of an output that is too long to be kept.
_LAST_BYTES = 16 << 10
#: How long a finished command's pipes are still read when a process it left behind holds them open.
_LINGER_S = 0.1


async def _gather(process: Process, data: bytes, *, began: float, keep: int) -> Execution:
    out, err = _Kept(keep), _Kept(keep)
    readers = [asyncio.create_task(out.collect(process.stdout)), asyncio.create_task(err.collect(process.stderr))]
    feeder = asyncio.create_task(_feed(process, data)) if data else None
    try:
        ended = await process.wait()
        if not all(reader.done() for reader in readers):
            await asyncio.wait(readers, timeout=_LINGER_S)
        for reader in readers:
            if reader.done():
                reader.result()
    finally:
        for task in (*readers, feeder):
            if task is not None:
                task.cancel()
    duration = time.monotonic() - began
    return Execution(
        ended, bytes(out.head), bytes(err.head), duration, bool(out.end or err.end), bytes(out.end), bytes(err.end)
    )


@dataclass(slots=True)
class _Kept:
    """The beginning of a stream and, of what has no room there, the end."""

    most: int
    head: bytearray = field(default_factory=bytearray)
    end: bytearray = field(default_factory=bytearray)

    async def collect(self, stream: Stream) -> None:
        async for chunk in stream:
            room = self.most - len(self.head)
            if room > 0:
                self.head += chunk[:room]
            if len(chunk) > room:
                self.end += chunk[max(room, 0) :]
                del self.end[:-_LAST_BYTES]


async def _feed(process: Process, data: bytes) -> None:
    await process.write(data)
    await process.close_stdin()


async def _pump(process: Process, log: Log) -> None:
    async def move(stream: Stream) -> None:
        async for chunk in stream:
            log.append(chunk)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(move(process.stdout))
            group.create_task(move(process.stderr))
    finally:
        log.close()
        process.release()
