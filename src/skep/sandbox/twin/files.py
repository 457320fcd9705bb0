"""The files of a sandbox, by way of its twin."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from typing import Any

from skep.errors import Denied, InvalidRequest, LimitReached, SkepError, Unavailable
from skep.sandbox.files import READ_LIMIT_BYTES, Change, Entry
from skep.sandbox.tree import meaning
from skep.sandbox.twin.answer import CHANGED, FOUND, LISTED, NUMBER, Answer, Failure, Found, read
from skep.sandbox.twin.conversation import Conversation
from skep.sandbox.twin.inside import wire
from skep.sandbox.twin.inside.wire import Violation
from skep.sandbox.twin.pulled import Inflow, Outflow

_PATH_LIMIT = 4095
_PIECE = 1 << 20


class TwinFiles:
    """Implements `Files` over a conversation. Paths are looked up inside, by whoever the twin is."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    async def read(self, path: str, *, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        whole = bytearray()
        async for piece in self._pieces(path, limit=limit_bytes):
            if len(whole) + len(piece) > limit_bytes:  # it has grown since it was measured
                whole += piece[: limit_bytes - len(whole)]
                break
            whole += piece
        return bytes(whole)

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        async for piece in self._pieces(path):
            yield piece

    async def write(self, path: str, data: bytes | str | AsyncIterable[bytes], *, mode: int | None = None) -> None:
        pieces = _pieces(data) if isinstance(data, bytes | str) else data
        await self._send("write", path, pieces, mode=mode)

    async def append(self, path: str, data: bytes | str) -> None:
        await self._send("append", path, _pieces(data))

    async def pack(self, path: str = ".", *, known: Iterable[bytes] = ()) -> AsyncGenerator[bytes, None]:
        """Yield a folder as one stream; see `inside.packing`. What is halted can be packed too."""
        digests = b"".join(known).hex()
        async for piece in self._pieces(path, act="pack", known=digests):
            yield piece

    async def plant(self, pieces: AsyncIterable[bytes], path: str = ".") -> None:
        """Make a folder what a stream says, instead of what it is."""
        await self._send("plant", path, pieces)

    async def list(self, path: str = ".") -> list[Entry]:
        answer = await self._ask("list", path)
        return sorted(
            (_entry(found) for found in understood(self._conversation, LISTED, answer.data)),
            key=lambda entry: entry.name,
        )

    async def stat(self, path: str) -> Entry:
        answer = await self._ask("stat", path)
        return _entry(understood(self._conversation, FOUND, answer.data))

    async def move(self, source: str, target: str) -> None:
        await self._ask("move", source, target=_sent(target))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        await self._ask("remove", path, recursive=recursive)

    async def mkdir(self, path: str) -> None:
        await self._ask("mkdir", path)

    async def watch(self, path: str = ".") -> AsyncIterator[Change]:
        party = _Watching(self._conversation)
        order = json.dumps({"path": _sent(path)}).encode()
        party.number = self._conversation.open(party)
        try:
            self._conversation.say(wire.WATCH, party.number, order)
            _require((await party.answer.given()).failure, path)
            while change := await party.next():
                yield change
        finally:
            self._conversation.say(wire.RELEASE, party.number)
            self._conversation.forget(party.number)
        raise self._conversation.gone()

    async def _ask(self, act: str, path: str, **more: Any) -> Answer:
        order = json.dumps({"act": act, "path": _sent(path), **more}).encode()
        answer = await self._conversation.ask(wire.FILE, order)
        _require(answer.failure, path)
        return answer

    async def _pieces(
        self, path: str, *, act: str = "read", limit: int | None = None, **more: Any
    ) -> AsyncIterator[bytes]:
        party = _Reading(self._conversation)
        order = json.dumps({"act": act, "path": _sent(path), "limit": limit, **more}).encode()
        party.number = self._conversation.open(party)
        try:
            self._conversation.say(wire.FILE, party.number, order)
            _require((await party.answer.given()).failure, path, limit=limit)
            while piece := await party.inflow.read():
                yield piece
        finally:
            self._conversation.say(wire.RELEASE, party.number)
            self._conversation.forget(party.number)
        if party.broken:
            raise Unavailable(f"{path!r} could not be read to its end", hint="look at the disk inside")
        if not party.whole:
            raise self._conversation.gone()

    async def _send(self, act: str, path: str, pieces: AsyncIterable[bytes], *, mode: int | None = None) -> None:
        party = _Writing(self._conversation)
        order = json.dumps({"act": act, "path": _sent(path), "mode": mode}).encode()
        party.number = self._conversation.open(party)
        try:
            self._conversation.say(wire.FILE, party.number, order)
            async for piece in pieces:
                await party.outflow.write(piece)
                if party.outflow.closed:
                    break
            party.outflow.end()
            _require((await party.answer.given()).failure, path)
        finally:
            self._conversation.say(wire.RELEASE, party.number)
            self._conversation.forget(party.number)


class _Reading:
    def __init__(self, conversation: Conversation) -> None:
        self.number = 0
        self.answer = Answer()
        self.inflow = Inflow(conversation, lambda: self.number, wire.BOTH)
        #: The end was seen, and it was not that of the sandbox.
        self.whole = False
        self.broken = False

    def hear(self, kind: int, payload: bytes) -> None:
        match kind:
            case wire.DATA:
                self.inflow.put(payload[wire.STREAM.size :])
            case wire.END:
                self.whole = True
                self.inflow.end()
            case wire.CLOSED:
                self.broken = True
                self.inflow.end()
            case _:
                self.answer.hear(kind, payload)

    def lose(self) -> None:
        self.answer.lose()
        self.inflow.end()


class _Writing:
    def __init__(self, conversation: Conversation) -> None:
        self.number = 0
        self.answer = Answer()
        self.outflow = Outflow(conversation, lambda: self.number)

    def hear(self, kind: int, payload: bytes) -> None:
        if kind == wire.TAKEN:
            self.outflow.taken(payload)
        else:
            self.answer.hear(kind, payload)
            self.outflow.close()

    def lose(self) -> None:
        self.answer.lose()
        self.outflow.close()


class _Watching:
    """The changes that came and were not asked for yet; their bytes are within the window."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._changes: deque[tuple[Change, int]] = deque()
        self._room = 2 * wire.WINDOW
        self._owed = 0
        self._arrived = asyncio.Event()
        self._lost = False
        self.number = 0
        self.answer = Answer()

    async def next(self) -> Change | None:
        while not self._changes and not self._lost:
            self._arrived.clear()
            await self._arrived.wait()
        if self._lost:
            return None
        change, cost = self._changes.popleft()
        self._room += cost
        self._owed += cost
        if self._owed >= wire.WINDOW // 4:
            self._conversation.say(wire.CREDIT, self.number, wire.AMOUNT.pack(wire.BOTH, self._owed))
            self._owed = 0
        return change

    def hear(self, kind: int, payload: bytes) -> None:
        if kind != wire.DATA:
            self.answer.hear(kind, payload)
            return
        cost = len(payload) - wire.STREAM.size
        self._room -= cost
        if self._room < 0:
            raise Violation("its twin sent more than it was allowed to")
        found = read(CHANGED, payload[wire.STREAM.size :])
        for at, (what, name) in enumerate(found):
            self._changes.append((Change(what, _shown(name)), cost if at == 0 else 0))
        self._arrived.set()

    def lose(self) -> None:
        self._lost = True
        self.answer.lose()
        self._arrived.set()


async def _pieces(data: bytes | str) -> AsyncIterator[bytes]:
    whole = data.encode() if isinstance(data, str) else data
    for start in range(0, len(whole), _PIECE):
        yield whole[start : start + _PIECE]


def _sent(path: str) -> str:
    """Return a path as it travels, or refuse one that no kernel takes."""
    if "\0" in path:
        raise InvalidRequest("a path contains a NUL character", hint="remove the character")
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a path is not valid text: {error.reason}", hint="use UTF-8 text") from error
    if len(name) > _PATH_LIMIT:
        raise InvalidRequest(f"a path of {len(path)} characters is too long", hint="use a shorter one")
    return wire.name_out(name)


def _shown(name: str) -> str:
    return os.fsdecode(wire.name_in(name))


def _entry(found: Found) -> Entry:
    name, kind, size, mode, modified_at, target = found
    return Entry(_shown(name), kind, size, mode, modified_at, None if target is None else _shown(target))


def _require(failure: Failure | None, path: str, *, limit: int | None = None) -> None:
    if failure is not None:
        raise _reason(failure, path, limit)


def _reason(failure: Failure, path: str, limit: int | None) -> SkepError:
    match failure.why:
        case "folder":
            return InvalidRequest(f"{path!r} is a folder", hint="list it, or name a file in it")
        case "special":
            return Denied(f"{path!r} is an other file: only regular files are opened")
        case "linked":
            return Denied(f"{path!r} has other names (hard links)", hint="write it anew instead of appending to it")
        case "proc":
            return Denied(f"{path!r} is in /proc: only stored files are opened", hint="use a command inside")
        case "large":
            return LimitReached(
                f"{path!r} has {failure.detail} bytes, more than the {limit} that are read at once",
                hint="stream it instead",
            )
        case "many":
            return LimitReached(
                f"{path!r} has more than {failure.detail} entries", hint="list it with a command inside"
            )
        case None:
            return meaning(OSError(failure.errno, os.strerror(failure.errno)), path)


async def count(conversation: Conversation) -> int:
    """Return how many processes descend from the twin."""
    answer = await conversation.ask(wire.COUNT)
    return int(understood(conversation, NUMBER, answer.value))


def understood(conversation: Conversation, form: Any, payload: bytes | bytearray) -> Any:
    """Return what an answer says; one that says nothing ends the conversation."""
    try:
        return read(form, payload)
    except Violation as error:
        conversation.lose(str(error))
        raise conversation.gone() from error
