"""The door of a held workspace: questions, answers, errors and descriptors between processes."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.programs import started

from skep import errors
from skep.errors import InvalidRequest, LimitReached, NotFound, SkepError, Unavailable, WorkspaceBusy
from skep.workspace.door import Answer, Door, NobodyHome, call


class Porter:
    """Answers what tests ask."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go_on = asyncio.Event()
        self.waiting = 0

    async def respond(self, request: dict[str, Any]) -> Answer:
        self.asked.append(request["act"])
        match request["act"]:
            case "echo":
                return Answer({"said": request["text"]})
            case "fail":
                raise getattr(errors, request["type"])("it went wrong", hint="do otherwise")
            case "odd":
                raise InvalidRequest("no file \udcff here", hint="\udcff")
            case "private":
                raise NobodyHome("of a kind that only this module has", hint="so")
            case "open":
                return Answer({}, tuple(os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in request["paths"]))
            case "fill":
                return Answer({"text": "x" * request["size"]})
            case "system":
                raise OSError(28, "No space left on device")
            case "wait":
                self.waiting += 1
                await self.go_on.wait()
        return Answer({})


@pytest.fixture
def porter() -> Porter:
    return Porter()


@pytest.fixture
async def door(tmp_path: Path, porter: Porter) -> AsyncIterator[Path]:
    async with await Door.open(tmp_path, porter.respond):
        yield tmp_path


async def until(count: int, porter: Porter) -> None:
    async with asyncio.timeout(10):
        while porter.waiting < count:
            await asyncio.sleep(0.01)


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


async def test_a_question_is_answered(door: Path) -> None:
    answer = await call(door, {"act": "echo", "text": "hello ☃ \ud800"})
    assert answer == Answer({"said": "hello ☃ \ud800"})


async def test_many_ask_at_once_and_each_gets_its_answer(door: Path) -> None:
    answers = await asyncio.gather(*(call(door, {"act": "echo", "text": n}) for n in range(60)))
    assert [answer.body["said"] for answer in answers] == list(range(60))


async def test_a_long_answer_arrives_whole(door: Path) -> None:
    assert (await call(door, {"act": "fill", "size": 20 << 20})).body["text"] == "x" * (20 << 20)


@pytest.mark.parametrize(
    "name", [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SkepError)]
)
async def test_an_error_is_raised_as_what_it_was(door: Path, name: str) -> None:
    with pytest.raises(getattr(errors, name)) as raised:
        await call(door, {"act": "fail", "type": name})
    assert type(raised.value).__name__ == name
    assert (raised.value.message, raised.value.hint) == ("it went wrong", "do otherwise")


async def test_an_error_that_others_do_not_know_is_raised_as_the_nearest_they_do(door: Path) -> None:
    with pytest.raises(NotFound) as raised:
        await call(door, {"act": "private"})
    assert type(raised.value) is NotFound


async def test_an_error_may_name_a_file_whose_name_is_no_text(door: Path) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await call(door, {"act": "odd"})
    assert (raised.value.message, raised.value.hint) == ("no file \\udcff here", "\\udcff")


async def test_an_error_of_the_system_is_told_without_ending_the_door(door: Path) -> None:
    with pytest.raises(Unavailable, match="No space left"):
        await call(door, {"act": "system"})
    assert (await call(door, {"act": "echo", "text": 1})).body == {"said": 1}


async def test_descriptors_come_along_and_none_is_left_behind(door: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"file{number}" for number in range(8)]
    for path in paths:
        path.write_text(path.name)
    before = descriptors()
    answer = await call(door, {"act": "open", "paths": [str(path) for path in paths]})
    assert len(descriptors()) == len(before) + 8
    assert not any(os.get_inheritable(fd) for fd in answer.fds)
    with answer.closing():
        assert [os.read(fd, 100).decode() for fd in answer.fds] == [path.name for path in paths]
    assert descriptors() == before


async def test_more_descriptors_than_a_door_hands_out_are_an_error_and_closed(door: Path) -> None:
    before = descriptors()
    with pytest.raises(errors.Defect):
        await call(door, {"act": "open", "paths": ["/dev/null"] * 9})
    assert descriptors() == before


@pytest.mark.parametrize(
    ("request_", "error"),
    [({"act": "echo", "text": "x" * (1 << 20)}, "ask for less"), ({"act": "fill", "size": 65 << 20}, "ask for less")],
    ids=["question", "answer"],
)
async def test_what_is_too_long_is_refused(door: Path, request_: dict[str, Any], error: str) -> None:
    with pytest.raises(LimitReached) as refused:
        await call(door, request_)
    assert error in (refused.value.hint or "")


async def test_without_a_holder_nobody_is_home(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(NobodyHome):
            await call(folder, {"act": "echo", "text": 1})


async def test_a_closed_door_is_gone(tmp_path: Path, porter: Porter) -> None:
    before = descriptors()
    async with await Door.open(tmp_path, porter.respond):
        assert stat.S_IMODE((tmp_path / "door").stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before
    with pytest.raises(NobodyHome):
        await call(tmp_path, {"act": "echo", "text": 1})


DYING = """
import asyncio, os, signal, sys
from pathlib import Path
from skep.workspace.door import Door

async def respond(request):
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    await Door.open(Path(sys.argv[1]), respond)
    Path(sys.argv[1], "door.new").touch()  # as if it had died while it hung another
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_door_of_a_dead_holder_is_nobodys_and_is_replaced(tmp_path: Path, porter: Porter) -> None:
    with started([sys.executable, "-c", DYING, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert await asyncio.to_thread(holder.stdout.readline) == b"ready\n"
        with pytest.raises(Unavailable, match="before it answered"):
            await call(tmp_path, {"act": "echo", "text": 1})
    assert (tmp_path / "door").is_socket()
    with pytest.raises(NobodyHome):
        await call(tmp_path, {"act": "echo", "text": 1})
    async with await Door.open(tmp_path, porter.respond):
        assert (await call(tmp_path, {"act": "echo", "text": 1})).body == {"said": 1}


async def test_a_door_that_closes_leaves_its_successors_alone(tmp_path: Path, porter: Porter) -> None:
    first = await Door.open(tmp_path, porter.respond)
    async with await Door.open(tmp_path, porter.respond):
        await first.close()
        assert (await call(tmp_path, {"act": "echo", "text": 1})).body == {"said": 1}


async def test_a_folder_may_lie_as_deep_as_it_likes(tmp_path: Path, porter: Porter) -> None:
    folder = tmp_path.joinpath(*(["n" * 100] * 20))
    folder.mkdir(parents=True)
    async with await Door.open(folder, porter.respond):
        assert (await call(folder, {"act": "echo", "text": 1})).body == {"said": 1}


async def test_questions_that_were_heard_are_answered_before_a_door_is_closed(tmp_path: Path, porter: Porter) -> None:
    door = await Door.open(tmp_path, porter.respond)
    waiting = [asyncio.ensure_future(call(tmp_path, {"act": "wait"})) for _ in range(5)]
    await until(5, porter)
    closing = asyncio.ensure_future(door.close())
    with pytest.raises(NobodyHome):
        while True:  # until the door is gone; before, it answers
            await call(tmp_path, {"act": "echo", "text": 1})
    assert not closing.done()
    porter.go_on.set()
    assert await asyncio.gather(*waiting) == [Answer({})] * 5
    await closing


async def test_whoever_is_not_greeted_knows_that_nothing_was_done(tmp_path: Path, porter: Porter) -> None:
    """A holder that ends has questions in its queue that it never looked at."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "door"))
        listener.listen(5)
        asking = asyncio.ensure_future(call(tmp_path, {"act": "echo", "text": 1}))
        for _ in range(10):
            await asyncio.sleep(0)
    with pytest.raises(NobodyHome):
        await asking
    assert porter.asked == []


async def test_a_caller_who_leaves_does_not_undo_what_was_asked(door: Path, porter: Porter) -> None:
    asking = asyncio.ensure_future(call(door, {"act": "wait"}))
    await until(1, porter)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    porter.go_on.set()
    assert (await call(door, {"act": "echo", "text": 1})).body == {"said": 1}
    assert porter.asked == ["wait", "echo"]


async def test_an_answer_that_does_not_come_is_given_up(door: Path, porter: Porter) -> None:
    with pytest.raises(Unavailable, match="no answer in"):
        await call(door, {"act": "wait"}, timeout_s=0.05)
    porter.go_on.set()


async def test_too_many_questions_at_once_are_refused_and_not_kept(door: Path, porter: Porter) -> None:
    waiting = [asyncio.ensure_future(call(door, {"act": "wait"})) for _ in range(64)]
    await until(64, porter)
    with pytest.raises(LimitReached):
        await call(door, {"act": "echo", "text": 1})
    porter.go_on.set()
    await asyncio.gather(*waiting)
    assert (await call(door, {"act": "echo", "text": 1})).body == {"said": 1}


async def test_errors_keep_what_they_are_to_whoever_handles_them(door: Path) -> None:
    for general in (WorkspaceBusy, errors.Conflict, InvalidRequest):
        with pytest.raises(general):
            await call(door, {"act": "fail", "type": "WorkspaceBusy"})
