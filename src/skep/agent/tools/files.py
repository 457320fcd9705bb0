"""Files below /workspace: read, written, edited and listed by the paths that a command inside would use."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from skep.agent import scratchpad
from skep.agent.actions import EditFile, ListFiles, ReadFile, WriteFile
from skep.agent.desk import Desk
from skep.agent.excerpt import Excerpt
from skep.agent.observations import Entry, FileEdited, FileRead, FileWritten, Listed, Observation
from skep.agent.pictures import picture_type
from skep.agent.tool import Tool
from skep.agent.tools.paths import MEMORY, shared, within
from skep.errors import Denied, InvalidRequest, LimitReached
from skep.sessions.sniff import HEAD_BYTES

#: The largest file that is edited, and that an edit makes.
_EDIT_BYTES = 4 << 20
_MOST_ENTRIES = 500
#: A file can claim to be larger than JSON can say.
_MOST_SIZE = (1 << 53) - 1


async def read_file(action: ReadFile, desk: Desk) -> Observation:
    computer, path = await desk.computer(), within(action.path)
    excerpt, head = Excerpt(action.start, action.lines), b""
    async with computer.files() as files:
        async for chunk in files.stream(path):
            head = head or chunk[:HEAD_BYTES]
            if excerpt.feed(chunk):
                break
    text, then, note = excerpt.result()
    if b"\0" in head and (kind := picture_type(head)):
        return FileRead(stamp=action.stamp, path=path, text="", start=1, note=f"this is {kind}", picture=path)
    return FileRead(stamp=action.stamp, path=path, text=text, start=action.start, next=then, note=note)


async def write_file(action: WriteFile, desk: Desk) -> Observation:
    computer, path = await desk.computer(), within(action.path)
    if shared(path):
        size = await _write_memory(desk, path, lambda old: old + action.content if action.append else action.content)
        return FileWritten(stamp=action.stamp, path=path, size=size)
    async with computer.files() as files:
        if action.append:
            await files.append(path, action.content)
        else:
            await files.write(path, action.content)
        size = (await files.stat(path)).size
    return FileWritten(stamp=action.stamp, path=path, size=size)


async def edit_file(action: EditFile, desk: Desk) -> Observation:
    computer, path = await desk.computer(), within(action.path)
    if shared(path):
        replaced = 0

        def change(old: str) -> str:
            nonlocal replaced
            text, replaced = edited(old, action)
            return text

        await _write_memory(desk, path, change)
        return FileEdited(stamp=action.stamp, path=path, replaced=replaced)
    async with computer.files() as files:
        entry = await files.stat(path)
        text, replaced = edited(_text(path, await files.read(path, limit_bytes=_EDIT_BYTES)), action)
        await files.write(path, text, mode=entry.mode & 0o777 if entry.kind == "file" else None)
    return FileEdited(stamp=action.stamp, path=path, replaced=replaced)


async def list_files(action: ListFiles, desk: Desk) -> Observation:
    computer, top = await desk.computer(), within(action.path)
    entries: list[Entry] = []
    waiting = deque([(top, 1)])
    async with computer.files() as files:
        while waiting and len(entries) <= _MOST_ENTRIES:
            folder, depth = waiting.popleft()
            for one in await files.list(folder):
                path = f"{folder}/{one.name}"
                entries.append(Entry(path=path, kind=one.kind, size=min(one.size, _MOST_SIZE)))
                if one.kind == "folder" and depth < action.depth:
                    waiting.append((path, depth + 1))
    cut = len(entries) > _MOST_ENTRIES
    return Listed(stamp=action.stamp, path=top, entries=tuple(entries[:_MOST_ENTRIES]), truncated=cut)


def edited(text: str, action: EditFile) -> tuple[str, int]:
    """Return a text with the replacement made, and how often it was."""
    found = text.count(action.old)
    if action.old == action.new:
        raise InvalidRequest("old and new are the same", hint="say what is to be different")
    if found == 0:
        raise InvalidRequest(
            "old does not occur in the file", hint="read it again: spaces and line ends have to match exactly"
        )
    if found > 1 and not action.all:
        raise InvalidRequest(f"old occurs {found} times", hint="give more of the text around it, or all=true")
    if len(text) + found * (len(action.new) - len(action.old)) > _EDIT_BYTES:
        raise LimitReached(f"the file would be larger than {_EDIT_BYTES:,} bytes", hint="use a program")
    return text.replace(action.old, action.new), found


async def _write_memory(desk: Desk, path: str, change: Callable[[str], str]) -> int:
    if path != MEMORY or desk.household is None:
        raise Denied(
            f"{path} cannot be written: /workspace/hive is for reading, all but the scratchpad of {MEMORY}",
            hint=f"write between {scratchpad.OPEN} and {scratchpad.CLOSE}, or below /workspace",
        )
    return await asyncio.to_thread(scratchpad.rewrite, desk.household, change)


def _text(path: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not text", hint="use a program to change it") from error


TOOLS = (
    Tool(ReadFile, read_file, repeatable=True),
    Tool(WriteFile, write_file, repeatable=lambda action, _: not action.append),
    Tool(EditFile, edit_file),
    Tool(ListFiles, list_files, repeatable=True),
)
