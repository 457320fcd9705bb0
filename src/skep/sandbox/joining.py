"""Use a sandbox that another process holds: the guest's side.

The holder hands over a connection to the agent inside (`Sandbox.admit`) and what there is to know of the sandbox
(`Sandbox.introduction`). From then on the guest speaks with the agent itself, and its commands, their output and its
work on files never pass through the holder. What concerns everybody inside stays with the holder.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import socket
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from skep.errors import Conflict, InvalidRequest, LimitReached, SandboxLost
from skep.sandbox.agent import BEGIN, END, Agent, Report, closed_in_children
from skep.sandbox.cgroups import Group
from skep.sandbox.egress.policy import Policy
from skep.sandbox.guest import told_limit
from skep.sandbox.limits import CommandLimits, LimitName, Limits
from skep.sandbox.resident import ResidentSandbox
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Stack
from skep.sandbox.tree import Tree
from skep.sandbox.watcher import Watcher

P = ParamSpec("P")
T = TypeVar("T")
Told = TypeVar("Told", bound=BaseModel)

_READY_S = 10.0


class Introduction(BaseModel):
    """What a holder tells of its sandbox."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1]
    id: str
    limits: Limits
    environment: dict[str, str]
    #: Who made files belong to, when Skep runs as root.
    owner: tuple[int, int] | None
    #: Where the kernel counts what it ended or refused for a limit.
    group: Group


async def join(control: socket.socket, introduction: Mapping[str, Any]) -> JoinedSandbox:
    """Use a sandbox through a connection that its holder made; takes the connection over."""
    agent = Agent(control)
    try:
        told = understood(Introduction, introduction)
        closed_in_children().add(control)
        async with asyncio.timeout(_READY_S):
            root = await agent.ready()
        if root < 0:
            raise LimitReached("the root folder did not arrive", hint="raise this process's limit of open files")
        return JoinedSandbox(told, agent, root)
    except TimeoutError as error:
        agent.close()
        raise SandboxLost("the sandbox does not answer", hint="end the process that holds the workspace") from error
    except BaseException:
        agent.close()
        raise


class Visiting(Sandbox):
    """What every sandbox of another process refuses: it concerns everybody inside."""

    @abc.abstractmethod
    def _is_lost(self) -> bool: ...

    async def pause(self) -> None:
        self._refuse("be paused")

    async def resume(self) -> None:
        self._refuse("be resumed")

    async def kill_all(self) -> None:
        self._refuse("be emptied")

    async def admit(self) -> socket.socket:
        self._refuse("take other processes in")

    def _refuse(self, act: str) -> NoReturn:
        if self._is_lost():
            raise SandboxLost("the sandbox is gone", hint="resolve the session or create a new sandbox")
        raise InvalidRequest(
            f"sandbox {self.id} cannot {act} from here: another process holds it, and others may use it too",
            hint="let the process that holds the workspace do it",
        )


class JoinedSandbox(Visiting, ResidentSandbox):
    """A sandbox of another process. Leaving it, or dying, ends the commands that were started here and no others."""

    mechanism: ClassVar[str] = "joined"

    def __init__(self, told: Introduction, agent: Agent, root: int) -> None:
        Sandbox.__init__(self)
        self.id = told.id
        self.limits = told.limits
        self.files = GuestTree(root, owner=told.owner, lost=agent.lost, agent=agent)
        self._env = told.environment
        self._group = told.group
        self._agent = agent
        self._settled = asyncio.Event()
        self._settled.set()  # the agent itself makes guests wait
        self._watcher = Bystander(agent, self.files, told.limits, watch_memory=told.group.way == "none")
        self._rlimits = self._rlimits_for(CommandLimits())

    async def stop(self) -> None:
        """Leave, which ends the commands started here. Safe to repeat; the sandbox goes on."""
        self._agent.close()
        self.files.close()
        for job in self.jobs():
            job.abandon()  # something that has left its group may still hold the pipes

    async def set_policy(self, policy: Policy) -> None:
        self._refuse("be given another policy")

    async def restack(self, stack: Stack) -> None:
        self._refuse("be given another workspace")

    def _is_lost(self) -> bool:
        return self._agent.lost.is_set()

    def _judge(self, before: tuple[int, int], cpu_s: int | None, report: Report) -> LimitName | None:
        told = told_limit(report.a) if report.b else None
        return told or super()._judge(before, cpu_s, report)


class Bystander(Watcher):
    """Counts what can be seen from here, and leaves the watching to the holder."""

    def watch(self, process: object) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class GuestTree(Tree):
    """The files of a sandbox whose holder may put others in their place, but not while somebody is at work on them."""

    agent: Agent
    _holds: int = -1

    async def write(self, path: str, data: bytes | str | AsyncIterable[bytes], *, mode: int | None = None) -> None:
        if isinstance(data, bytes | str):
            await Tree.write(self, path, data, mode=mode)
        else:
            async with self._at_work():
                await Tree.write(self, path, data, mode=mode)

    async def _call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async def done() -> T:
            async with self._at_work():
                return await Tree._call(self, work, *args, **kwargs)

        # Shielded: a thread works on when its caller is cancelled.
        task = asyncio.ensure_future(done())
        task.add_done_callback(_heed)
        return await asyncio.shield(task)

    @asynccontextmanager
    async def _at_work(self) -> AsyncIterator[None]:
        begun = asyncio.ensure_future(self.agent.ask(BEGIN))
        begun.add_done_callback(_heed)
        try:
            holds = (await asyncio.shield(begun)).a
            if holds != self._holds:
                self._home, self._holds = await asyncio.to_thread(self._base_identity), holds
            yield
        finally:
            ending = asyncio.ensure_future(self._end_of(begun))
            _endings.add(ending)
            ending.add_done_callback(_endings.discard)
            await asyncio.shield(ending)

    async def _end_of(self, begun: asyncio.Future[Report]) -> None:
        """Say that work has ended whose beginning was announced, even if nobody waited for the answer."""
        with contextlib.suppress(SandboxLost):
            await begun
            await self.agent.ask(END)


#: Ends of work on their way: the event loop itself holds tasks only weakly.
_endings: set[asyncio.Task[None]] = set()


def _heed(task: asyncio.Future[Any]) -> None:
    """Look at how a task ended of which the one who asked may have gone."""
    if not task.cancelled():
        task.exception()


def understood(form: type[Told], introduction: Mapping[str, Any]) -> Told:
    """Read an introduction, or raise Conflict if the holder speaks of its sandbox in another way."""
    try:
        return form.model_validate(introduction)
    except ValidationError as error:
        raise Conflict(
            f"the process that holds the workspace speaks of it as no Skep of this version does: {error}",
            hint="end that process, and let this version of Skep start the sandbox",
        ) from error
