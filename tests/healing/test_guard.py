from __future__ import annotations

from collections.abc import Callable

import pytest

from skep.healing.guard import GUIDANCE, LoopGuard, Notice, Pattern


def same(guard: LoopGuard, _: int) -> Notice | None:
    return guard.acted("ls /nowhere", "no such folder")


def pair(guard: LoopGuard, number: int) -> Notice | None:
    guard.acted("cat a", "1")
    return guard.acted("cat b", "2")


def error(guard: LoopGuard, number: int) -> Notice | None:
    return guard.acted(f"python try{number}.py", f"Segfault at 0x{number:08x}, pid {number}", failed=True)


def words(guard: LoopGuard, _: int) -> Notice | None:
    return guard.spoke()


@pytest.mark.parametrize(
    ("pattern", "round_", "warn_at", "stop_at"),
    [
        ("same_call", same, 3, 5),
        ("alternating", pair, 3, 5),
        ("repeated_error", error, 4, 7),
        ("monologue", words, 3, 5),
    ],
)
def test_a_worker_is_told_once_and_then_stopped(
    pattern: Pattern, round_: Callable[[LoopGuard, int], Notice | None], warn_at: int, stop_at: int
) -> None:
    guard = LoopGuard()
    notices = [round_(guard, number) for number in range(1, stop_at + 1)]
    expected: list[Notice | None] = [None] * stop_at
    expected[warn_at - 1] = Notice(pattern, GUIDANCE[pattern], stop=False)
    expected[stop_at - 1] = Notice(pattern, GUIDANCE[pattern], stop=True)
    assert notices == expected


def test_a_call_whose_result_changes_is_no_circle() -> None:
    guard = LoopGuard()
    assert [guard.acted("date", str(number)) for number in range(20)] == [None] * 20


def test_different_errors_are_no_circle() -> None:
    guard = LoopGuard()
    texts = ["no such file", "permission denied", "syntax error"] * 5
    assert [guard.acted(f"try {at}", text, failed=True) for at, text in enumerate(texts)] == [None] * 15


def test_asking_whether_something_is_done_by_now_is_no_circle() -> None:
    guard = LoopGuard()
    assert [guard.acted("poll job-1", "running", waiting=True) for _ in range(20)] == [None] * 20


def test_another_act_in_between_begins_the_count_anew() -> None:
    guard = LoopGuard()
    for _ in range(5):
        assert not any([same(guard, 0), same(guard, 0), guard.acted("write note", "done"), guard.acted("make", "ok")])


def test_acting_ends_a_monologue_and_going_well_a_row_of_errors() -> None:
    guard = LoopGuard()
    for number in range(9):
        assert (guard.spoke(), guard.spoke()) == (None, None)
        assert [error(guard, 4 * number + step) for step in range(3)] == [None] * 3
        assert guard.acted(f"ok {number}", "fine") is None


def test_one_call_that_fails_alike_is_told_of_as_what_it_is_first() -> None:
    guard = LoopGuard()
    notices = [guard.acted("make", "error", failed=True) for _ in range(5)]
    assert [(one.pattern, one.stop) for one in notices if one] == [
        ("same_call", False),
        ("repeated_error", False),
        ("same_call", True),
    ]
