"""The same sandbox for code that does not use asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from skep.sandbox.files import READ_LIMIT_BYTES, Entry, Files

if TYPE_CHECKING:
    from skep.sandbox.limits import CommandLimits
    from skep.sandbox.sandbox import Command, Execution, Job, Sandbox, User
    from skep.sandbox.shell import Shell

T = TypeVar("T")
#: A thread that is about to wait when a signal comes does not hear of it before it wakes up.
_NOTICE_S = 0.2


class BlockingSandbox:
    """A sandbox whose calls wait. Safe to use from several threads."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.id = sandbox.id
        self.files = BlockingFiles(sandbox.files)

    @classmethod
    def start(cls, make: Callable[[], Awaitable[Sandbox]]) -> BlockingSandbox:
        async def made() -> Sandbox:
            return await make()

        return cls(wait(made()))

    def run(
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
        return wait(
            self._sandbox.run(command, input=input, cwd=cwd, env=env, user=user, timeout_s=timeout_s, limits=limits)
        )

    def background(self, command: Command, *, cwd: str | None = None, user: User = "agent") -> Job:
        """Start a command that outlives this call; read its `log`, and end it with `kill`."""
        return wait(self._sandbox.background(command, cwd=cwd, user=user))

    def kill(self, job: Job) -> None:
        wait(job.kill())

    def shell(self, *, user: User = "agent") -> BlockingShell:
        return BlockingShell(wait(self._sandbox.shell(user=user)))

    def alive(self) -> bool:
        return wait(self._sandbox.alive())

    def pause(self) -> None:
        wait(self._sandbox.pause())

    def resume(self) -> None:
        wait(self._sandbox.resume())

    def kill_all(self) -> None:
        wait(self._sandbox.kill_all())

    def stop(self) -> None:
        wait(self._sandbox.stop())


class BlockingShell:
    """A persistent shell whose calls wait."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def run(self, command: str, *, input: bytes = b"", timeout_s: float | None = None) -> Execution:
        return wait(self._shell.run(command, input=input, timeout_s=timeout_s))

    def close(self) -> None:
        wait(self._shell.close())


class BlockingFiles:
    """The files of a sandbox, with calls that wait."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def read(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        return wait(self._files.read(path, limit_bytes=limit_bytes))

    def stream(self, path: str) -> Iterator[bytes]:
        pieces = self._files.stream(path)

        async def step() -> bytes | None:
            return await anext(pieces, None)

        while (piece := wait(step())) is not None:
            yield piece

    def write(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        wait(self._files.write(path, data, mode=mode))

    def append(self, path: str, data: bytes | str) -> None:
        wait(self._files.append(path, data))

    def list(self, path: str = ".") -> list[Entry]:
        return wait(self._files.list(path))

    def stat(self, path: str) -> Entry:
        return wait(self._files.stat(path))

    def move(self, source: str, target: str) -> None:
        wait(self._files.move(source, target))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        wait(self._files.remove(path, recursive=recursive))

    def mkdir(self, path: str) -> None:
        wait(self._files.mkdir(path))


async def elsewhere(work: Coroutine[Any, Any, T]) -> T:
    """Do work on the loop that waiting calls share, from another one; it is cancelled with the caller."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Do work on the loop that waiting calls share, and wait for it."""
    call = _Call(work)
    try:
        _loop().call_soon_threadsafe(call.begin)
        return call.outcome()
    except KeyboardInterrupt:
        # It may have come at any point of the lines above, so the loop finds out how far the call has got.
        _loop().call_soon_threadsafe(call.cancel)
        raise


class _Call(Generic[T]):
    """Work for the event loop, and what comes of it; all but `outcome` is called in the loop's thread.

    The two threads share one plain lock, released once. An interrupt leaves it in order wherever it strikes, whereas a
    `concurrent.futures.Future` could be left locked, and the loop would then wait for ever.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def outcome(self) -> T:
        """Wait for the end of the work; return or raise what it did."""
        while not self._ended.acquire(timeout=_NOTICE_S):
            pass
        assert self._task is not None
        return self._task.result()

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(lambda _: self._ended.release())

    def cancel(self) -> None:
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that all waiting calls of this process share, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="skep-loop", daemon=True).start()
    return loop
