"""What runs on each machine of E2B and answers for it: processes and files, by Connect and by plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import stat
from collections.abc import AsyncIterator
from typing import Any, TypeVar, cast

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from e2b.envd.filesystem import filesystem_connect, filesystem_pb
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from protobuf.wkt.google.protobuf.timestamp_pb import Timestamp
from tests.clouds.e2b.machines import Fleet, Machine, Piece, Running

from skep.errors import Conflict, InvalidRequest, NotFound, SandboxLost
from skep.sandbox.files import Change, Entry
from skep.sandbox.sandbox import Exit, Size, User

Context = RequestContext[Any, Any]
T = TypeVar("T")
GONE = "the connection to the sandbox ended before the stream completed"
_USERS: dict[str, User] = {"root": "root", "agent": "agent", "user": "agent"}


def machine_of(fleet: Fleet, context: Context) -> Machine:
    return fleet.machines[context.request_headers.get("e2b-sandbox-id") or ""]


def user_of(context: Context) -> User:
    scheme, _, words = (context.request_headers.get("authorization") or "").partition(" ")
    name = base64.b64decode(words).decode().partition(":")[0] if scheme == "Basic" else "user"
    if name not in _USERS:
        raise ConnectError(Code.UNAUTHENTICATED, f"invalid username: '{name}'")
    return _USERS[name]


async def until_cut(machine: Machine, source: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield what comes from a machine, and fail as soon as it is halted or gone."""
    gone = asyncio.ensure_future(machine.cut.wait())
    try:
        while True:
            coming = asyncio.ensure_future(anext(source, None))
            await asyncio.wait((coming, gone), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                await asyncio.wait([coming])
                raise ConnectError(Code.UNAVAILABLE, GONE)
            item = coming.result()
            if item is None:
                return
            yield item
    finally:
        gone.cancel()
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


class Processes(process_connect.Process):
    """The service `process.Process`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def list(self, request: process_pb.ListRequest, ctx: Context) -> process_pb.ListResponse:
        running = machine_of(self._fleet, ctx).running
        return process_pb.ListResponse(
            processes=[
                process_pb.ProcessInfo(
                    pid=pid, config=process_pb.ProcessConfig(cmd=one.argv[0], args=one.argv[1:], envs={})
                )
                for pid, one in running.items()
            ]
        )

    async def start(self, request: process_pb.StartRequest, ctx: Context) -> AsyncIterator[process_pb.StartResponse]:
        machine = machine_of(self._fleet, ctx)
        one = await self._spawn(machine, request, user_of(ctx))
        events = _events(one)
        self._begin(machine, one)
        limit = ctx.request_headers.get("connect-timeout-ms")
        if limit:
            asyncio.get_running_loop().call_later(int(limit) / 1000, self._expire, one)
        async for event in until_cut(machine, events):
            yield process_pb.StartResponse(event=event)

    async def connect(
        self, request: process_pb.ConnectRequest, ctx: Context
    ) -> AsyncIterator[process_pb.ConnectResponse]:
        machine = machine_of(self._fleet, ctx)
        async for event in until_cut(machine, _events(_selected(machine, request.process))):
            yield process_pb.ConnectResponse(event=event)

    async def send_input(self, request: process_pb.SendInputRequest, ctx: Context) -> process_pb.SendInputResponse:
        one = _selected(machine_of(self._fleet, ctx), request.process)
        await _write(one, request.input)
        return process_pb.SendInputResponse()

    async def stream_input(
        self, request: AsyncIterator[process_pb.StreamInputRequest], ctx: Context
    ) -> process_pb.StreamInputResponse:
        one: Running | None = None
        async for message in request:
            match message.event:
                case Oneof(value=process_pb.StreamInputRequest.StartEvent() as start):
                    one = _selected(machine_of(self._fleet, ctx), start.process)
                case Oneof(value=process_pb.StreamInputRequest.DataEvent() as data) if one is not None:
                    await _write(one, data.input)
        return process_pb.StreamInputResponse()

    async def close_stdin(self, request: process_pb.CloseStdinRequest, ctx: Context) -> process_pb.CloseStdinResponse:
        await _selected(machine_of(self._fleet, ctx), request.process).process.close_stdin()
        return process_pb.CloseStdinResponse()

    async def send_signal(self, request: process_pb.SendSignalRequest, ctx: Context) -> process_pb.SendSignalResponse:
        one = _selected(machine_of(self._fleet, ctx), request.process)
        await one.process.signal(int(request.signal), group=False)
        return process_pb.SendSignalResponse()

    async def update(self, request: process_pb.UpdateRequest, ctx: Context) -> process_pb.UpdateResponse:
        one = _selected(machine_of(self._fleet, ctx), request.process)
        if request.pty is not None and request.pty.size is not None:
            await one.process.resize(Size(request.pty.size.rows, request.pty.size.cols))
        return process_pb.UpdateResponse()

    async def _spawn(self, machine: Machine, request: process_pb.StartRequest, user: User) -> Running:
        wanted = request.process or process_pb.ProcessConfig()
        size = request.pty.size if request.pty is not None else None
        argv = [wanted.cmd, *wanted.args]
        try:
            process = await machine.computer.start(
                argv,
                cwd=wanted.cwd or None,
                env=dict(wanted.envs),
                user=user,
                stdin=request.stdin if request.has_field("stdin") else True,
                terminal=Size(size.rows, size.cols) if size is not None else None,
            )
        except InvalidRequest as error:
            raise ConnectError(Code.INVALID_ARGUMENT, error.message) from error
        one = machine.running[process.pid] = Running(process, argv, terminal=size is not None)
        return one

    def _begin(self, machine: Machine, one: Running) -> None:
        one.pump = asyncio.ensure_future(one.pass_on())
        one.pump.add_done_callback(lambda _: machine.running.pop(one.process.pid, None))

    def _expire(self, one: Running) -> None:
        if one.process.exit is None:
            self._killing = asyncio.ensure_future(one.process.kill())


def _events(one: Running) -> AsyncIterator[process_pb.ProcessEvent]:
    return _told_of(one, one.listen())  # it listens from this moment, before the process can end


async def _told_of(one: Running, output: AsyncIterator[Piece]) -> AsyncIterator[process_pb.ProcessEvent]:
    event = process_pb.ProcessEvent
    yield event(event=_one("start", event.StartEvent(pid=one.process.pid)))
    async for name, data in output:
        yield event(event=_one("data", event.DataEvent(output=_one(name, data))))
    yield event(event=_one("end", _ended(one.process.exit)))


def _one(name: str, value: object) -> Any:
    return Oneof(cast(Any, name), value)


def _ended(how: Exit | None) -> process_pb.ProcessEvent.EndEvent:
    end = process_pb.ProcessEvent.EndEvent
    if how is None or how.code is None:
        return end(exit_code=-1, exited=False, status="signal: killed", error="signal: killed")
    status = f"exit status {how.code}"
    return end(exit_code=how.code, exited=True, status=status, error=status if how.code else None)


def _selected(machine: Machine, selector: process_pb.ProcessSelector | None) -> Running:
    match selector.selector if selector is not None else None:
        case Oneof(value=int(pid)) if pid in machine.running:
            return machine.running[pid]
        case other:
            raise ConnectError(Code.NOT_FOUND, f"process {other} not found")


async def _write(one: Running, given: process_pb.ProcessInput | None) -> None:
    match given.input if given is not None else None:
        case Oneof(value=bytes(data)):
            try:
                await one.process.write(data)
            except (InvalidRequest, SandboxLost) as error:
                raise ConnectError(Code.INTERNAL, error.message) from error
        case _:
            raise ConnectError(Code.UNIMPLEMENTED, "invalid input type")


class Filesystem(filesystem_connect.Filesystem):
    """The service `filesystem.Filesystem`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def stat(self, request: filesystem_pb.StatRequest, ctx: Context) -> filesystem_pb.StatResponse:
        return filesystem_pb.StatResponse(entry=await self._entry(ctx, request.path))

    async def make_dir(self, request: filesystem_pb.MakeDirRequest, ctx: Context) -> filesystem_pb.MakeDirResponse:
        files = machine_of(self._fleet, ctx).computer.files
        try:
            await files.stat(request.path)
        except NotFound:
            await files.mkdir(request.path)
        else:
            raise ConnectError(Code.ALREADY_EXISTS, f"directory already exists: {request.path}")
        return filesystem_pb.MakeDirResponse(entry=await self._entry(ctx, request.path))

    async def move(self, request: filesystem_pb.MoveRequest, ctx: Context) -> filesystem_pb.MoveResponse:
        with _told():
            await machine_of(self._fleet, ctx).computer.files.move(request.source, request.destination)
        return filesystem_pb.MoveResponse(entry=await self._entry(ctx, request.destination))

    async def list_dir(self, request: filesystem_pb.ListDirRequest, ctx: Context) -> filesystem_pb.ListDirResponse:
        with _told():
            listed = await machine_of(self._fleet, ctx).computer.files.list(request.path)
        return filesystem_pb.ListDirResponse(entries=[_info(request.path, entry) for entry in listed])

    async def remove(self, request: filesystem_pb.RemoveRequest, ctx: Context) -> filesystem_pb.RemoveResponse:
        with _told():
            await machine_of(self._fleet, ctx).computer.files.remove(request.path, recursive=True)
        return filesystem_pb.RemoveResponse()

    async def watch_dir(
        self, request: filesystem_pb.WatchDirRequest, ctx: Context
    ) -> AsyncIterator[filesystem_pb.WatchDirResponse]:
        machine = machine_of(self._fleet, ctx)
        response = filesystem_pb.WatchDirResponse
        changes = until_cut(machine, machine.computer.files.watch(request.path))
        coming = asyncio.ensure_future(anext(changes, None))
        with _told():
            await machine.computer.files.stat(request.path)  # the watch begins before this is answered
        yield response(event=_one("start", response.StartEvent()))
        while (change := await coming) is not None:
            yield response(event=_one("filesystem", _event(change)))
            coming = asyncio.ensure_future(anext(changes, None))

    async def _entry(self, ctx: Context, path: str) -> filesystem_pb.EntryInfo:
        with _told():
            entry = await machine_of(self._fleet, ctx).computer.files.stat(path)
        return _info(path.rpartition("/")[0], entry)


class _told:  # noqa: N801 - it reads as the statement it is
    """Tell a failure of the files as envd does."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        match error:
            case NotFound():
                raise ConnectError(Code.NOT_FOUND, error.message) from error
            case Conflict():
                raise ConnectError(Code.ALREADY_EXISTS, error.message) from error
            case InvalidRequest():
                raise ConnectError(Code.INVALID_ARGUMENT, error.message) from error


def _info(folder: str, entry: Entry) -> filesystem_pb.EntryInfo:
    kind = filesystem_pb.FileType.DIRECTORY if entry.kind == "folder" else filesystem_pb.FileType.FILE
    return filesystem_pb.EntryInfo(
        name=entry.name,
        type=kind,
        path=f"{folder}/{entry.name}",
        size=entry.size,
        mode=entry.mode,
        permissions=stat.filemode(entry.mode)[1:],
        owner="agent",
        group="agent",
        modified_time=Timestamp(seconds=int(entry.modified_at)),
        symlink_target=entry.target,
        is_symlink=entry.kind == "link",
    )


def _event(change: Change) -> filesystem_pb.FilesystemEvent:
    kinds = {
        "created": filesystem_pb.EventType.CREATE,
        "modified": filesystem_pb.EventType.WRITE,
        "removed": filesystem_pb.EventType.REMOVE,
    }
    return filesystem_pb.FilesystemEvent(name=change.path, type=kinds.get(change.kind))
