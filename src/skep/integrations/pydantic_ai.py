"""Skep's workspaces for pydantic-ai: `Agent(..., capabilities=[SkepWorkspace()])`.

A backend's environment is a workspace of Skep's: it outlives the run, the backend and the process, until `destroy`.
"""

from __future__ import annotations

import asyncio
import math
import os
import posixpath
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from skep.errors import InvalidRequest, LimitReached, NotFound, SandboxLost
from skep.integrations.command import carry_out, refused_with
from skep.integrations.extra import extra
from skep.integrations.filesystem import HOME, Filesystem
from skep.integrations.home import workspaces_at
from skep.integrations.standby import Standby
from skep.sandbox.blocking import elsewhere
from skep.sandbox.egress.network import Network
from skep.sandbox.files import Entry
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.sandbox import Execution, Sandbox
from skep.workspace.workspaces import Workspaces

with extra("pydantic-ai", brings="pydantic_ai"):
    from pydantic_ai import RunContext
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.tools import AgentDepsT
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        ReadOnlyWorkspace,
        SupportsCommands,
        SupportsFilesystem,
        SupportsRealpath,
        Workspace,
        WorkspaceBackend,
        WorkspaceCommand,
        WorkspaceError,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )

__all__ = ["SkepWorkspace", "SkepWorkspaceBackend"]

T = TypeVar("T")

PROVIDER = "skep"
_LABELS = {"made-for": "pydantic-ai"}
#: What a command may print to one stream, and how much of it an error shows.
_KEEP_BYTES = 10 * MIB
_SHOWN_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the environment of a backend is made with."""

    home: str | os.PathLike[str] | None
    template: str
    network: Sequence[str]
    env: Mapping[str, str] | None
    limits: Limits | None
    mechanism: str
    options: Mapping[str, Any] | None

    def workspaces(self) -> Workspaces:
        return workspaces_at(self.home, limits=self.limits, mechanism=self.mechanism, options=self.options)

    def standby(self, workspaces: Workspaces, workspace_id: str) -> Standby:
        """Share what this process has of a workspace: only one in a process can hold it."""
        key = (str(workspaces.home), workspace_id)
        live = _live.get(key)
        if live is None:
            network = Network.to(*self.network) if self.network else None
            live = Standby(lambda: workspaces.enter(workspace_id, network=network, env=self.env))
            _live[key] = live
        return live


#: The workspaces that this process uses, by home and id. Only the loop that waiting calls share touches it.
_live: WeakValueDictionary[tuple[str, str], Standby] = WeakValueDictionary()


class SkepWorkspaceBackend(WorkspaceBackend, SupportsCommands, SupportsFilesystem, SupportsRealpath):
    """A workspace in a sandbox, made by the first operation, or the one that `ref` names.

    `workspace` gives it a name of yours: one of that name which is there is used. `network` lists the hosts that may
    be reached, `home` is where the workspaces are (Skep's state folder by default). Use it on any event loop.
    """

    def __init__(
        self,
        ref: WorkspaceRef | None = None,
        *,
        workspace: str | None = None,
        home: str | os.PathLike[str] | None = None,
        template: str = "minimal",
        network: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        mechanism: str = "bubblewrap",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if ref is not None and ref.provider != PROVIDER:
            raise ValueError(f"a workspace of {ref.provider!r} is not one of Skep's")
        self._ref = ref
        self._wanted = workspace
        self._terms = Terms(
            home=home,
            template=template,
            network=network,
            env=env,
            limits=limits,
            mechanism=mechanism,
            options=options,
        )
        self._finding: asyncio.Task[Standby] | None = None
        self._destroyed = False

    @property
    def ref(self) -> WorkspaceRef | None:
        return self._ref

    async def working_dir(self) -> str:
        await self._do(self._with(_nothing))
        return HOME

    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - pydantic-ai's name
    ) -> CommandResult:
        if isinstance(command, str) != shell:
            raise TypeError("a text is run with shell=True, a sequence of words without")
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
            raise ValueError("timeout must be a positive number of seconds, or None")
        return _result(await self._do(self._run(command, env, timeout)), timeout)

    async def read_bytes(self, path: str) -> bytes:
        return await self._with_files(lambda files: files.read(path))

    async def write_bytes(self, path: str, data: bytes) -> None:
        await self._with_files(lambda files: files.write(path, data))

    async def stat(self, path: str) -> FileEntry:
        return _entry(path, await self._with_files(lambda files: files.stat(path)))

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        entries = await self._with_files(lambda files: files.list(path))
        return [_entry(posixpath.join(path, found.name), found) for found in entries]

    async def make_dir(self, path: str) -> None:
        await self._with_files(lambda files: files.mkdir(path))

    async def remove(self, path: str) -> None:
        await self._with_files(lambda files: _remove(files, path))

    async def exists(self, path: str) -> bool:
        return await self._with_files(lambda files: files.exists(path))

    async def realpath(self, path: str) -> str:
        return await self._with_files(lambda files: files.realpath(path))

    async def close(self) -> None:
        """End the sandbox; the workspace stays, and the next operation starts another over it."""
        await elsewhere(self._close())

    async def destroy(self) -> None:
        """Do away with the workspace and what runs in it."""
        self._destroyed = True
        await elsewhere(self._destroy())

    async def _do(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await elsewhere(work)
        except (SandboxLost, NotFound) as error:
            if self._destroyed or isinstance(error, NotFound) or not await elsewhere(self._is_there()):
                raise WorkspaceUnavailableError(f"the workspace is gone: {error.message}") from error
            raise  # whoever tries again gets another sandbox over the same files
        except LimitReached as error:
            raise WorkspaceError(error.message) from error

    async def _with_files(self, act: Callable[[Filesystem], Awaitable[T]]) -> T:
        return await self._do(self._with(lambda sandbox: act(Filesystem(sandbox.files))))

    # What follows runs on the loop that waiting calls share.

    async def _with(self, act: Callable[[Sandbox], Awaitable[T]]) -> T:
        return await (await self._standby()).do(act)

    async def _standby(self) -> Standby:
        if self._destroyed:
            raise WorkspaceUnavailableError("the workspace was destroyed")
        if self._finding is None or (self._finding.done() and self._finding.exception() is not None):
            self._finding = asyncio.create_task(self._find())
        return await asyncio.shield(self._finding)

    async def _find(self) -> Standby:
        workspaces = self._terms.workspaces()
        if self._ref is None:
            await self._make(workspaces)
        assert self._ref is not None
        try:
            labels = workspaces.show(self._ref.id).labels
        except InvalidRequest as error:
            raise WorkspaceUnavailableError(f"the workspace is gone: {error.message}") from error
        # Whoever can hand in a ref, a history of messages say, is not to reach the workspaces of hives by it.
        if self._wanted is None and not _LABELS.items() <= labels.items():
            raise WorkspaceUnavailableError(f"the workspace {self._ref.id} was not made for pydantic-ai")
        return self._terms.standby(workspaces, self._ref.id)

    async def _make(self, workspaces: Workspaces) -> None:
        workspace_id = self._wanted or f"run-{secrets.token_hex(8)}"
        if self._wanted is None or workspaces.register.condition(workspace_id) != "ready":
            await workspaces.create(workspace_id, template=self._terms.template, labels=_LABELS)
        self._ref = WorkspaceRef(provider=PROVIDER, id=workspace_id)

    async def _is_there(self) -> bool:
        return self._ref is not None and self._terms.workspaces().register.condition(self._ref.id) == "ready"

    async def _run(self, command: WorkspaceCommand, env: Mapping[str, str] | None, timeout_s: float | None) -> Any:
        try:
            return await self._with(
                lambda sandbox: carry_out(sandbox, command, keep_bytes=_KEEP_BYTES, timeout_s=timeout_s, env=env)
            )
        except InvalidRequest as error:
            return CommandResult(exit_code=refused_with(error), stdout="", stderr=f"{error.message}\n")

    async def _close(self) -> None:
        if self._finding is not None:
            finding, self._finding = self._finding, None
            await asyncio.wait([finding])
            if finding.exception() is None:
                await finding.result().close()

    async def _destroy(self) -> None:
        await self._close()
        if self._ref is not None:
            await self._terms.workspaces().destroy(self._ref.id)


@dataclass
class SkepWorkspace(AbstractCapability[AgentDepsT]):
    """Give each run of an agent a workspace of Skep's: a new one, the one named `workspace`, or that of a ref."""

    workspace: str | None = None
    _: KW_ONLY
    home: str | os.PathLike[str] | None = None
    template: str = "minimal"
    network: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    limits: Limits | None = None
    mechanism: str = "bubblewrap"
    options: Mapping[str, Any] | None = None
    read_only: bool = False
    id: str | None = "skep_workspace"

    def get_workspace(self, ctx: RunContext[AgentDepsT], *, ref: WorkspaceRef | None) -> WorkspaceBackend | None:
        if ref is not None and (ref.provider != PROVIDER or self.workspace not in (None, ref.id)):
            return None
        backend = SkepWorkspaceBackend(
            ref,
            workspace=self.workspace,
            home=self.home,
            template=self.template,
            network=self.network,
            env=self.env,
            limits=self.limits,
            mechanism=self.mechanism,
            options=self.options,
        )
        return ReadOnlyWorkspace(Workspace(backend)) if self.read_only else backend


def _result(ran: Execution | CommandResult, timeout_s: float | None) -> CommandResult:
    if isinstance(ran, CommandResult):
        return ran
    if ran.truncated:
        raise WorkspaceOutputLimitError(
            f"the command printed more than {_KEEP_BYTES} bytes; let it write to a file, and read parts of that",
            limit=_KEEP_BYTES,
            stdout=ran.stdout[:_SHOWN_BYTES].decode(errors="replace"),
            stderr=ran.stderr[:_SHOWN_BYTES].decode(errors="replace"),
        )
    if ran.limit == "time":
        raise WorkspaceTimeoutError(
            f"the command was not done after {timeout_s:g} s", stdout=ran.text, stderr=ran.error_text
        )
    return CommandResult(exit_code=ran.exit_code, stdout=ran.text, stderr=ran.error_text)


async def _nothing(_: Sandbox) -> None:
    """Be content that there is a sandbox."""


async def _remove(files: Filesystem, path: str) -> None:
    folder, name = posixpath.split(path.rstrip("/") or "/")
    target = posixpath.join(await files.realpath(folder), name)
    if f"{HOME}/".startswith(f"{target.rstrip('/')}/"):
        raise ValueError(f"{path!r} is the working directory or holds it, and is not removed")
    await files.remove(path)


def _entry(path: str, found: Entry) -> FileEntry:
    folder = found.kind == "folder"
    size = found.size if found.kind == "file" else None
    return FileEntry(name=found.name, path=path, is_dir=folder, size=size)
