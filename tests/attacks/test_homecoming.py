"""What comes home from a machine elsewhere may be an agent's own work: nothing of it gets out of its folder.

The stream is what `inside.packing` makes, altered. The control is an unpacker that believes what it reads: with it,
each attempt that writes somewhere does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from skep.errors import LimitReached, SkepError, Unavailable, WorkspaceDamaged
from skep.sandbox.census import Usage
from skep.sandbox.erase import erase
from skep.sandbox.twin.inside.packing import DATA, HOLE, LENGTH, PIECE, SAME, Packing
from skep.workspace.luggage import Feed, Unpacking

ROOM = Usage(1 << 20, 100)
#: More than an interpreter goes down by calls.
DEPTH = 1100
TOP = ["folder", 0, "", 0o755, 0, 0, [], "", 0, False, {}]


def row(code: str, name: str, *, depth: int = 1, mode: int = 0o644, size: int = 0, **more: Any) -> list[Any]:
    target, back = more.get("target", ""), more.get("back", 0)
    return [code, depth, name, mode, 0, size, [], target, back, more.get("opaque", False), more.get("notes", {})]


def stream(*parts: list[Any] | bytes, end: bool = True) -> bytes:
    """Write rows, and pieces of content as they are, as a stream; its digest is right."""
    whole = bytearray()
    for part in (TOP, *parts):
        text = part if isinstance(part, bytes) else json.dumps([part, True]).encode()
        whole += text if isinstance(part, bytes) else LENGTH.pack(len(text)) + text
    if end:
        text = json.dumps(["end", hashlib.sha256(whole).hexdigest()]).encode()
        whole += LENGTH.pack(len(text)) + text
    return bytes(whole)


def file(name: str, data: bytes, **more: Any) -> list[list[Any] | bytes]:
    return [row("file", name, size=len(data), **more), PIECE.pack(DATA, len(data)) + data]


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]


async def come_home(data: bytes, target: Path, **more: Any) -> Unpacking:
    target.mkdir()
    given = {"room": ROOM, "base": target, "contents": {}, **more}
    unpacking = Unpacking(Feed(_pieces(data)), **given)
    await asyncio.to_thread(unpacking.into, target, None)
    return unpacking


def believe(data: bytes, target: Path) -> None:
    """Unpack a stream as somebody does who trusts it: the control."""
    target.mkdir()
    at, folder = 0, target
    while True:
        (length,) = LENGTH.unpack_from(data, at)
        body = json.loads(data[at + LENGTH.size : at + LENGTH.size + length])
        at += LENGTH.size + length
        if body[0] == "end":
            return
        code, _, name, mode, _, size, _, aim, *_ = body[0]
        if code == "folder":
            folder = folder / name
            folder.mkdir(exist_ok=True)
        elif code == "link":
            (folder / name).symlink_to(aim)
        elif code == "file":
            (folder / name).write_bytes(data[at + PIECE.size : at + PIECE.size + size])
            (folder / name).chmod(mode)
            at += PIECE.size + size


#: Attempts to write beside the folder, or through a link out of it: what is escaped to is `prey`.
ESCAPES = {
    "up": file("../prey", b"caught"),
    "by path": [row("folder", "a"), *file("../../prey", b"caught", depth=2)],
    "through a link": [row("link", "way", target=".."), *file("way/prey", b"caught")],
    "into a link": [row("link", "way", target=".."), row("folder", "way"), *file("prey", b"caught", depth=2)],
    "over a link": [row("link", "way", target="../prey"), *file("way", b"caught")],
    "absolutely": file("{beside}/prey", b"caught"),
}


@pytest.mark.parametrize("attempt", ESCAPES)
async def test_no_name_leads_out_of_the_folder(tmp_path: Path, attempt: str) -> None:
    parts = [
        [word.replace("{beside}", str(tmp_path)) if isinstance(word, str) else word for word in part]
        if isinstance(part, list)
        else part
        for part in ESCAPES[attempt]
    ]
    prey = tmp_path / "prey"
    with pytest.raises(WorkspaceDamaged, match="not the files of a workspace"):
        await come_home(stream(*parts), tmp_path / "guarded")
    assert not prey.exists()
    believe(stream(*parts), tmp_path / "control")
    assert prey.read_bytes() == b"caught"


@pytest.mark.parametrize(
    ("kind", "what", "parts"),
    [
        (WorkspaceDamaged, "a row of the kind whiteout", [row("whiteout", "gone")]),
        (WorkspaceDamaged, "a row whose", [row("device", "sda")]),
        (WorkspaceDamaged, "a row of the kind folder", [row("folder", "bare", opaque=True)]),
        (WorkspaceDamaged, "File exists", [*file("a", b"1"), *file("a", b"2")]),
        (WorkspaceDamaged, "in no folder", file("a", b"1", depth=3)),
        (WorkspaceDamaged, "a name of nothing", [row("name", "a", back=7)]),
        (WorkspaceDamaged, "longer than its file", [row("file", "a", size=1), PIECE.pack(DATA, 2) + b"12"]),
        (WorkspaceDamaged, "longer than its file", [row("file", "a", size=9), PIECE.pack(HOLE, 1 << 60)]),
        (WorkspaceDamaged, "content that nobody has", [row("file", "a", size=9), PIECE.pack(SAME, 9) + bytes(32)]),
        (WorkspaceDamaged, "a row of 4", [LENGTH.pack(0xFFFFFFF0)]),
        (WorkspaceDamaged, "no JSON", [LENGTH.pack(3) + b"[[["]),
        (WorkspaceDamaged, "attribute", file("a", b"", notes={"trusted.overlay.opaque": "y"})),
        (WorkspaceDamaged, "null", [row("link", "a", target="to\0nowhere")]),
        (WorkspaceDamaged, "time", [["folder", 1, "a", 0o755, (1 << 63) * 10**9, 0, [], "", 0, False, {}]]),
        (WorkspaceDamaged, "encode", file("a", b"", notes={"user.a": "\ud800"})),
        (LimitReached, "1,048,576 bytes", [row("folder", str(n), notes={"user.a": "x" * 400_000}) for n in range(3)]),
        (LimitReached, "100 files", [row("folder", str(number)) for number in range(100)]),
        (LimitReached, "1,048,576 bytes", [part for n in range(9) for part in file(str(n), bytes(1 << 17))]),
        (Unavailable, "could not read", [LENGTH.pack(19) + b'["failed","a disk"]']),
    ],
)
async def test_what_no_workspace_has_is_refused(
    tmp_path: Path, kind: type[SkepError], what: str, parts: list[Any]
) -> None:
    with pytest.raises(kind, match=what) as refused:
        await come_home(stream(*parts), tmp_path / "home")
    assert refused.value.hint


async def test_a_stream_that_was_cut_or_altered_is_refused(tmp_path: Path) -> None:
    whole = stream(*file("a", b"sown"))
    altered = whole.replace(b"sown", b"torn")
    for number, data in enumerate((whole[:-1], whole[:40], b"", stream(*file("a", b"1"), end=False), altered)):
        with pytest.raises(WorkspaceDamaged, match=r"ends too early|digest"):
            await come_home(data, tmp_path / str(number))
    await come_home(whole, tmp_path / "whole")
    assert (tmp_path / "whole/a").read_bytes() == b"sown"


async def test_nothing_that_comes_home_lends_its_owner_to_anybody(tmp_path: Path) -> None:
    data = stream(*file("tool", b"#!/bin/sh\n", mode=0o6755))
    await come_home(data, tmp_path / "guarded")
    assert stat.S_IMODE((tmp_path / "guarded/tool").stat().st_mode) == 0o755
    believe(data, tmp_path / "control")
    assert stat.S_IMODE((tmp_path / "control/tool").stat().st_mode) == 0o6755


async def test_content_that_is_here_is_taken_from_here_only_if_it_is_the_same(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    content = os.urandom(1 << 15)
    (base / "large").write_bytes(content)
    sent, again = bytearray(), bytearray()
    top = os.open(base, os.O_PATH)
    first = Packing(sent.extend, noting=True)
    first.run(top)
    Packing(again.extend, frozenset(first.contents)).run(top)
    os.close(top)
    assert len(again) < 1000 < len(content) < len(sent)
    await come_home(bytes(again), tmp_path / "home", base=base, contents=first.contents)
    assert (tmp_path / "home/large").read_bytes() == content
    (base / "large").write_bytes(os.urandom(1 << 15))
    with pytest.raises(WorkspaceDamaged, match="has changed here"):
        await come_home(bytes(again), tmp_path / "other", base=base, contents=first.contents)
    (base / "large").unlink()
    (base / "large").symlink_to(tmp_path / "home/large")
    with pytest.raises(WorkspaceDamaged, match="has changed here"):
        await come_home(bytes(again), tmp_path / "linked", base=base, contents=first.contents)


async def test_a_tree_of_any_depth_comes_home(tmp_path: Path) -> None:
    deep, home = tmp_path / "deep", tmp_path / "home"
    deep.mkdir()
    here = os.open(deep, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with os.fdopen(os.open("large", os.O_WRONLY | os.O_CREAT, dir_fd=here), "wb") as leaf:
        leaf.write(bytes(1 << 15))
    os.close(here)
    data = bytearray()
    top = os.open(deep, os.O_PATH)
    packing = Packing(data.extend, noting=True)
    packing.run(top)
    os.close(top)
    try:
        unpacking = await come_home(bytes(data), home, room=Usage(1 << 20, 2 * DEPTH))
        assert not packing.contents and not unpacking.held  # nobody keeps a path of that length in mind
        again = bytearray()
        top = os.open(home, os.O_PATH)
        Packing(again.extend).run(top)
        os.close(top)
        assert again == data
    finally:
        for folder in (deep, home):
            erase(str(folder), folder.stat().st_ino)
