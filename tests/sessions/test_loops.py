"""What a process does again and again survives what breaks it, and does not stall unseen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from skep.errors import SkepError, Unavailable
from skep.sessions.loops import Loops

NAME = "the counting of bees"


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.01)


def trouble(loops: Loops) -> str:
    try:
        loops.check()
    except SkepError as error:
        return error.message
    return ""


@pytest.mark.parametrize("breaks", [ZeroDivisionError("no bees"), asyncio.CancelledError(), None])
async def test_a_loop_that_ends_for_whatever_reason_is_begun_again(breaks: BaseException | None) -> None:
    begun = 0

    async def loop() -> None:
        nonlocal begun
        begun += 1
        if begun == 1:
            if breaks is not None:
                raise breaks
            return
        await asyncio.Event().wait()

    loops = Loops()
    async with loops.kept({NAME: loop}):
        await until(lambda: begun == 2)
        loops.check()


async def test_a_round_that_fails_or_is_cancelled_from_below_does_not_end_its_loop() -> None:
    rounds: list[int | None] = []

    async def count() -> int:
        match len(rounds):
            case 0:
                raise Unavailable("the meadow is closed")
            case 1:
                asyncio.ensure_future(asyncio.sleep(0)).cancel()
                raise asyncio.CancelledError
            case number:
                return number

    async def loop() -> None:
        while True:
            rounds.append(await loops.attempt(NAME, count()))
            await asyncio.sleep(0)

    loops = Loops()
    async with loops.kept({NAME: loop}):
        await until(lambda: len(rounds) > 3)
        assert rounds[:4] == [None, None, 2, 3]


async def test_a_loop_that_stalls_or_is_gone_is_told_by_its_name() -> None:
    freed = asyncio.Event()

    async def loop() -> None:
        await freed.wait()
        while True:
            loops.went_well(NAME)
            await asyncio.sleep(0)

    loops = Loops(stall_s=0.1)
    async with loops.kept({NAME: loop}):
        await until(lambda: trouble(loops).startswith(f"{NAME} has not gone well for"))
        freed.set()
        await until(lambda: trouble(loops) == "")
        for task in asyncio.all_tasks():
            if task.get_name() == f"skep keeps {NAME}":
                task.cancel()
        await until(lambda: trouble(loops) == f"{NAME} has ended")
