"""What hostile callers can do to a workspace's door, and a hostile holder to those who call.

The control for callers is a door such as one writes first: one conversation after the other, no bounds, no deadlines.
For holders it is the truth, which is believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.attack import DEADLINE_S, IS_ROOT, soon

from skep.errors import Defect, Denied, LimitReached, SkepError
from skep.workspace.door import Answer, Door, call

STRANGER = 61235
CHILD_S = 60
GREETED, HUNG_UP, NOT_ALLOWED = 10, 11, 12
HEAD = struct.Struct(">I")


async def respond(request: dict[str, Any]) -> Answer:
    return Answer({"said": request.get("text")})


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Path]:
    folder = tmp_path / "door"
    folder.mkdir()
    async with await Door.open(folder, respond):
        yield folder


@pytest.fixture
async def naive(tmp_path: Path) -> AsyncIterator[Path]:
    """Give the folder of a door without any of the protections."""
    folder = tmp_path / "naive"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "door"))
        listener.listen(1000)
        listener.setblocking(False)
        serving = asyncio.create_task(_serve_naively(listener))
        yield folder
        serving.cancel()
        await asyncio.wait([serving])
        if not serving.cancelled():
            serving.exception()


async def _serve_naively(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    async def read(peer: socket.socket, size: int) -> bytes:
        read = b""
        while len(read) < size:
            if not (piece := await loop.sock_recv(peer, size - len(read))):
                raise EOFError
            read += piece
        return read

    while True:
        peer, _ = await loop.sock_accept(listener)
        with peer:
            await loop.sock_sendall(peer, b"\x01")
            (size,) = HEAD.unpack(await read(peer, 4))
            request = json.loads(await read(peer, size))
            body = json.dumps({"body": {"said": request["text"]}, "fds": 0}).encode()
            await loop.sock_sendall(peer, HEAD.pack(len(body)) + body)


async def answers(folder: Path, within_s: float = DEADLINE_S) -> bool:
    try:
        return (await asyncio.wait_for(call(folder, {"text": 1}), within_s)).body == {"said": 1}
    except (TimeoutError, SkepError):
        return False


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def knocked(folder: Path, said: bytes = b"") -> socket.socket:
    """Knock at a door and say something, as far as it is listened to."""
    peer = socket.socket(socket.AF_UNIX)
    peer.setblocking(False)
    while True:
        with contextlib.suppress(BlockingIOError):
            peer.connect(str(folder / "door"))
            break
        await asyncio.sleep(0.001)
    with contextlib.suppress(ConnectionError, TimeoutError):
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(peer, said), 5)
    return peer


def message(text: bytes) -> bytes:
    return HEAD.pack(len(text)) + text


SAID = {
    "nothing": b"",
    "half a length": b"\0\0",
    "a length and nothing": HEAD.pack(100),
    "a giant length": HEAD.pack(2**32 - 1),
    "a giant length and some of it": HEAD.pack(2**32 - 1) + b"x" * 100_000,
    "one byte too few": message(b'{"text": 1}')[:-1],
    "garbage": message(bytes(range(256))),
    "no text": message(b"\xff\xfe"),
    "no object": message(b"[1]"),
    "another object": message(b'{"act": {}}'),
    "no end of brackets": message(b"[" * 100_000),
    "no end of objects": message(b'{"a":' * 100_000),
    "a giant number": message(b'{"text": ' + b"9" * 10_000 + b"}"),
}


@pytest.mark.parametrize("name", SAID)
async def test_a_hostile_caller_does_not_hurt_the_door(door: Path, naive: Path, name: str) -> None:
    assert await answers(naive)
    before = descriptors()
    with await knocked(naive, SAID[name]):
        assert not await answers(naive, 0.5), "the control holds, so the attempt shows nothing"
    with contextlib.ExitStack() as callers:
        for _ in range(5):
            callers.enter_context(await knocked(door, SAID[name]))
        assert await answers(door)
    assert await soon(lambda: descriptors() == before)


async def test_a_crowd_that_says_nothing_does_not_keep_others_out(door: Path, naive: Path) -> None:
    before = descriptors()
    with contextlib.ExitStack() as crowd:
        for _ in range(20):
            crowd.enter_context(await knocked(naive))
        assert not await answers(naive, 0.5), "the control holds, so the attempt shows nothing"
    with contextlib.ExitStack() as crowd:
        for count in range(1, 401):
            crowd.enter_context(await knocked(door))
            if count % 50 == 0:
                assert await answers(door)
        assert descriptors() <= before + 400 + 130
    assert await soon(lambda: descriptors() == before)


async def test_thousands_who_knock_and_run_leave_nothing_behind(door: Path) -> None:
    before = descriptors()
    for _ in range(3000):
        (await knocked(door)).close()
    assert await answers(door)
    assert await soon(lambda: descriptors() == before)


async def test_descriptors_sent_with_a_question_are_not_kept(door: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open("/dev/null") as file:
        socket.send_fds(theirs, [b"x"], [file.fileno()] * 30)
        _, taken, _, _ = socket.recv_fds(ours, 1, 64)  # the control: whoever takes what is sent has it
        assert len(taken) == 30
        for fd in taken:
            os.close(fd)
        before = descriptors()
        for _ in range(20):
            with await knocked(door) as peer:
                for byte in message(b'{"text": 1}'):
                    socket.send_fds(peer, [bytes([byte])], [file.fileno()] * 30)
                assert await answers(door)
        assert await soon(lambda: descriptors() == before)


@contextlib.contextmanager
def nothing_to_spare() -> Iterator[None]:
    """Have every descriptor in use that this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, hard))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


async def test_a_holder_without_a_descriptor_to_spare_answers_when_it_has_one(door: Path) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(door / "door"))
        peer.setblocking(False)
        with nothing_to_spare():
            for _ in range(20):
                await asyncio.sleep(0)
            with pytest.raises(BlockingIOError):
                peer.recv(1)
        loop = asyncio.get_running_loop()
        assert await asyncio.wait_for(loop.sock_recv(peer, 1), DEADLINE_S) == b"\x01"


async def in_child(act: Callable[[], int], *, stranger: bool) -> int:
    """Do something in a child, as somebody else if told so; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            if stranger:
                os.setgroups([])
                os.setresgid(STRANGER, STRANGER, STRANGER)
                os.setresuid(STRANGER, STRANGER, STRANGER)
            code = act()
        finally:
            os._exit(code)
    try:
        return await _exit_code(child)
    except BaseException:
        os.kill(child, signal.SIGKILL)  # nobody will knock at its door any more
        os.waitpid(child, 0)
        raise


async def _exit_code(child: int) -> int:
    async with asyncio.timeout(CHILD_S):
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            await asyncio.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


def knock(folder: Path) -> int:
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(folder / "door"))
            peer.settimeout(DEADLINE_S)
            return GREETED if peer.recv(1) else HUNG_UP
    except PermissionError:
        return NOT_ALLOWED


only_root = pytest.mark.skipif(not IS_ROOT, reason="only root can become somebody else")


@only_root
async def test_another_user_is_not_let_in(outside: Path) -> None:
    async with await Door.open(outside, respond):
        assert await in_child(lambda: knock(outside), stranger=False) == GREETED
        assert await in_child(lambda: knock(outside), stranger=True) == NOT_ALLOWED
        (outside / "door").chmod(0o666)  # as if the file system did not hold
        assert await in_child(lambda: knock(outside), stranger=True) == HUNG_UP


@only_root
@pytest.mark.parametrize("stranger", [False, True])
async def test_the_door_of_another_user_is_not_believed(outside: Path, stranger: bool) -> None:
    outside.chmod(0o777)

    def hold() -> int:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(outside / "soon"))
            listener.listen()
            (outside / "soon").rename(outside / "door")  # there is no door that nobody listens at yet
            with listener.accept()[0] as peer, contextlib.suppress(ConnectionError):
                peer.send(b"\x01")
                size = len(peer.recv(1000))
                body = json.dumps({"body": {"said": size}}).encode()
                peer.send(HEAD.pack(len(body)) + body)
        return 0

    holding = asyncio.ensure_future(in_child(hold, stranger=stranger))
    assert await soon((outside / "door").exists, DEADLINE_S)
    if stranger:
        with pytest.raises(Denied):
            await call(outside, {"text": 1})
    else:
        assert (await call(outside, {"text": 1})).body == {"said": 15}
    assert await holding == 0


LIES: dict[str, tuple[bytes, int, type[SkepError]]] = {
    "garbage": (message(bytes(range(256))), 2, Defect),
    "a giant length": (HEAD.pack(2**32 - 1), 2, Defect),
    "no object": (message(b"[]"), 2, Defect),
    "another object": (message(b'{"body": 1}'), 2, Defect),
    "no end of brackets": (message(b"[" * 100_000), 2, Defect),
    "an error that is none": (message(b'{"failure": "no"}'), 2, Defect),
    "an error of no known kind": (message(b'{"failure": {"type": "os", "message": "m"}}'), 2, SkepError),
    "more descriptors than said": (message(b'{"fds": 0}'), 2, LimitReached),
    "fewer descriptors than said": (message(b'{"fds": 3}'), 2, LimitReached),
    "more descriptors than can be": (message(b'{"fds": 200}'), 200, LimitReached),
}


async def _told(folder: Path, said: bytes, fds: int) -> Answer:
    """Call a holder that says this, whatever it was asked."""
    loop = asyncio.get_running_loop()
    (folder / "door").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, open("/dev/null") as file:
        listener.bind(str(folder / "door"))
        listener.listen()
        calling = asyncio.ensure_future(call(folder, {"text": 1}))
        await asyncio.sleep(0)
        peer, _ = listener.accept()
        with peer:
            peer.setblocking(False)
            peer.send(b"\x01")
            await loop.sock_recv(peer, 1000)
            socket.send_fds(peer, [said[:1]], [file.fileno()] * fds)
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(peer, said[1:])
            return await asyncio.wait_for(calling, DEADLINE_S)


@pytest.mark.parametrize("name", LIES)
async def test_a_hostile_holder_does_not_hurt_its_callers(tmp_path: Path, name: str) -> None:
    honest = await _told(tmp_path, message(b'{"body": {"said": 1}, "fds": 2}'), 2)
    assert (honest.body, len(honest.fds)) == ({"said": 1}, 2)
    with honest.closing():
        pass
    said, fds, kind = LIES[name]
    before = descriptors()
    with pytest.raises(kind) as raised:
        await _told(tmp_path, said, fds)
    assert type(raised.value) is kind
    assert descriptors() == before
