"""What a twin says is hostile: whatever it sends, the conversation takes it or ends, and keeps little of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sandbox.twin_links import Hall, ScriptedLink, sandbox_over

from skep.errors import SandboxLost, SkepError
from skep.sandbox.link import armoured
from skep.sandbox.sandbox import Size
from skep.sandbox.stream import StreamSandbox
from skep.sandbox.twin.inside import wire

REPORTS = st.one_of(st.integers(0, 255), st.sampled_from(range(wire.READY, wire.PONG + 1)))
FRAMES = st.lists(st.tuples(REPORTS, st.integers(0, 12), st.binary(max_size=64)), max_size=30)


@given(FRAMES, st.lists(st.integers(1, 40), max_size=60))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    frames: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(wire.frame(*one) for one in frames)
    parser = wire.Parser(wire.REPORT_LIMIT)
    seen: list[wire.Frame] = []
    for cut in [*cuts, len(data)]:
        seen += parser.feed(data[:cut])
        data = data[cut:]
    assert [tuple(one) for one in seen] == frames


@given(st.binary(max_size=300))
def test_a_parser_keeps_no_more_than_one_frame_may_have(data: bytes) -> None:
    parser = wire.Parser(64)
    with contextlib.suppress(wire.Violation):
        for start in range(0, len(data), 7):
            list(parser.feed(data[start : start + 7]))
            assert len(parser._held) <= 64 + wire.HEAD.size + 7


def test_a_frame_that_announces_more_than_is_allowed_ends_it_before_it_comes() -> None:
    with pytest.raises(wire.Violation):
        list(wire.Parser(wire.REPORT_LIMIT).feed(wire.HEAD.pack(wire.DATA, 1, wire.REPORT_LIMIT + 1)))


@settings(max_examples=150, deadline=None)
@given(FRAMES, st.binary(max_size=40))
def test_whatever_a_twin_says_every_call_ends(frames: list[tuple[int, int, bytes]], rest: bytes) -> None:
    """Each call gets an answer of ours, or the sandbox is lost; nothing else is raised and nothing waits."""
    asyncio.run(_survives(frames, rest))


async def _survives(frames: list[tuple[int, int, bytes]], rest: bytes) -> None:
    link = ScriptedLink()
    sandbox = await sandbox_over(link)
    calls = [
        asyncio.ensure_future(sandbox.run("true", input=b"x")),
        asyncio.ensure_future(_streamed(sandbox)),
        asyncio.ensure_future(sandbox.files.read("file")),
        asyncio.ensure_future(sandbox.files.write("file", b"x" * 100)),
        asyncio.ensure_future(sandbox.files.list()),
        asyncio.ensure_future(anext(sandbox.files.watch())),
        asyncio.ensure_future(sandbox.connect(80)),
        asyncio.ensure_future(sandbox.occupied()),
    ]
    await asyncio.sleep(0)
    link.say(b"".join(wire.frame(*one) for one in frames) + rest)
    link.hang_up()
    async with asyncio.timeout(10):
        results = await asyncio.gather(*calls, return_exceptions=True)
    await sandbox.stop()
    for result in results:
        if isinstance(result, socket.socket):
            result.close()
        assert not isinstance(result, BaseException) or isinstance(result, SkepError), repr(result)


async def _streamed(sandbox: StreamSandbox) -> None:
    process = await sandbox.start("cat", channel=True)
    try:
        await process.stdout.read()
        await process.wait()
    finally:
        process.release()


STARTED = wire.COUNTED.pack(77)
EXITED = wire.EXIT.pack(0, 0, 0, 0, 0, 0)

#: What a twin says after the order to start a command, whose id is 2, and never would.
LIES = {
    "about something that nobody asked for": [(wire.DATA, 99, b"\1x")],
    "an order": [(wire.START, 2, b"")],
    "an unknown kind": [(200, 2, b"")],
    "a second greeting": [(wire.READY, 0, wire.COUNTED.pack(1))],
    "that it started twice": [(wire.STARTED, 2, STARTED), (wire.STARTED, 2, STARTED)],
    "that it ended before it started": [(wire.EXITED, 2, EXITED)],
    "a stream that there is not": [(wire.STARTED, 2, STARTED), (wire.DATA, 2, b"\7x")],
    "more than was allowed": [(wire.STARTED, 2, STARTED)] + 2 * [(wire.DATA, 2, b"\1" + b"x" * 700_000)],
    "that it took what it was never given": [(wire.STARTED, 2, STARTED), (wire.TAKEN, 2, wire.COUNTED.pack(1))],
    "an exit that is too short": [(wire.STARTED, 2, STARTED), (wire.EXITED, 2, EXITED[:-1])],
    "a code that none has": [(wire.STARTED, 2, STARTED), (wire.EXITED, 2, wire.EXIT.pack(256, 0, 0, 0, 0, 0))],
    "a limit that there is not": [(wire.STARTED, 2, STARTED), (wire.EXITED, 2, wire.EXIT.pack(0, 9, 0, 0, 0, 9))],
    "nothing that can be read": [(wire.DATA, 2, b"")],
}


@pytest.mark.parametrize("name", LIES)
async def test_a_twin_that_lies_is_not_listened_to_any_more(name: str) -> None:
    link = ScriptedLink()
    sandbox = await sandbox_over(link)
    call = asyncio.ensure_future(sandbox.run("cat", input=b""))
    await asyncio.sleep(0.01)
    link.say(b"".join(wire.frame(*one) for one in LIES[name]))
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(call, 5)
    assert not await sandbox.alive()
    await asyncio.wait_for(link.closed.wait(), 5)
    await sandbox.stop()


async def test_the_same_talk_without_a_lie_is_heard() -> None:
    link = ScriptedLink()
    sandbox = await sandbox_over(link)
    call = asyncio.ensure_future(sandbox.run("cat"))
    await asyncio.sleep(0.01)
    for one in ((wire.STARTED, 2, STARTED), (wire.DATA, 2, b"\1hello"), (wire.EXITED, 2, EXITED)):
        link.say(wire.frame(*one))
    assert (await asyncio.wait_for(call, 5)).stdout == b"hello"
    await sandbox.stop()


HOSTILE_LISTS = [
    b"[[1,2,3]]",
    b'[["name","file",1,420,0.0]]',
    b'[["name","file",1e400,420,0.0,null]]',
    b'[["name","device",1,420,0.0,null]]',
    b'[["\\u4f60","file",1,420,0.0,null]]',
    b'[["' + b"x" * 5000 + b'","file",1,420,0.0,null]]',
    b'[["../up","file",1,420,0.0,null]]',
    b'[["..","folder",1,420,0.0,null]]',
    b'[["a\\u0000b","file",1,420,0.0,null]]',
    b"[" * 100_000,
    b"not json",
    b"",
]


@pytest.mark.parametrize("text", HOSTILE_LISTS, ids=range(len(HOSTILE_LISTS)))
async def test_a_list_that_cannot_be_is_the_end_of_the_sandbox(text: bytes) -> None:
    link = ScriptedLink()
    sandbox = await sandbox_over(link)
    call = asyncio.ensure_future(sandbox.files.list())
    await asyncio.sleep(0.01)
    link.say(wire.frame(wire.DATA, 2, b"\0" + text) + wire.frame(wire.DONE, 2, b"null"))
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(call, 5)
    await sandbox.stop()


async def test_a_twin_of_another_version_is_refused() -> None:
    link = ScriptedLink(version=wire.VERSION + 1)
    with pytest.raises(SkepError, match="version"):
        await sandbox_over(link)
    assert link.closed.is_set()


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_armour_carries_any_bytes_and_nothing_but_letters(pieces: list[bytes]) -> None:
    async def carried() -> None:
        inner = ScriptedLink(greet=False)
        link = armoured(inner)
        for piece in pieces:
            await link.write(piece)
        assert all(32 <= byte < 127 or byte == 10 for byte in inner.heard)
        inner.say(bytes(inner.heard))
        inner.hang_up()
        seen = b""
        while piece := await link.read():
            seen += piece
        assert seen == b"".join(pieces)

    asyncio.run(carried())


@pytest.mark.parametrize(
    "text", [b"\xff\n", b"a\n", b"====\n", b"x" * (5 << 20)], ids=["binary", "cut", "empty", "long"]
)
async def test_armour_that_is_broken_is_the_end(text: bytes) -> None:
    inner = ScriptedLink(greet=False)
    inner.say(text)
    with pytest.raises(SandboxLost):
        await armoured(inner).read()


async def test_a_house_that_is_gone_is_noticed_though_the_link_stays_open() -> None:
    hall = Hall()
    sandbox = await sandbox_over(ScriptedLink(), hall)
    call = asyncio.ensure_future(sandbox.run("true"))
    hall.standing = False
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(call, 5)
    await sandbox.stop()


async def test_a_twin_that_is_silent_for_too_long_is_given_up() -> None:
    sandbox = await sandbox_over(ScriptedLink(), patience_s=0.3)
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(sandbox.start("true", terminal=Size()), 5)
    await sandbox.stop()


async def test_a_twin_that_still_takes_what_it_is_sent_is_not_given_up() -> None:
    class SlowLink(ScriptedLink):
        async def write(self, data: bytes) -> None:
            await asyncio.sleep(len(data) / (1 << 20) * 0.2)
            await super().write(data)

    link = SlowLink()
    sandbox = await sandbox_over(link, patience_s=1.0)
    for _ in range(10):
        sandbox._conversation.say(wire.INPUT, 1, b"x" * (1 << 20))
    async with asyncio.timeout(30):
        while len(link.heard) < 10 << 20:
            assert await sandbox.alive()
            await asyncio.sleep(0.05)
    await sandbox.stop()


async def test_a_house_that_rests_may_be_silent_until_it_goes_on() -> None:
    hall = Hall(rests=True)
    sandbox = await sandbox_over(ScriptedLink(), hall, patience_s=0.1)
    await sandbox.pause()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sandbox.gone(), 1.2)
    await sandbox.resume()
    await asyncio.wait_for(sandbox.gone(), 5)
    await sandbox.stop()
