"""Notice when a worker goes round in circles: tell it first, then stop it."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, get_args

Pattern = Literal["same_call", "alternating", "repeated_error", "monologue"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)

#: After how many rounds of a pattern the worker is told, and after how many it is stopped.
WARN_AT: dict[Pattern, int] = {"same_call": 3, "alternating": 3, "repeated_error": 4, "monologue": 3}
STOP_AT: dict[Pattern, int] = {"same_call": 5, "alternating": 5, "repeated_error": 7, "monologue": 5}

GUIDANCE: dict[Pattern, str] = {
    "same_call": "You made the same call again and it gave the same result. It will not change by itself: use what you "
    "know from it, try something else, or finish and say what stands in the way.",
    "alternating": "You go back and forth between two calls whose results do not change. Decide which of them is "
    "right, or find out what is missing in a third way.",
    "repeated_error": "Different calls keep ending in the same error, so its cause lies elsewhere. Find the cause "
    "before the next try, or finish and say what stands in the way.",
    "monologue": "You keep writing without acting. Call a tool, or finish with your answer.",
}


@dataclass(frozen=True, slots=True)
class Notice:
    """What the guard has to say; `stop`: it was said before, and did not help."""

    pattern: Pattern
    guidance: str
    stop: bool


class LoopGuard:
    """Watches one attempt. It only counts, so a replayed attempt gets the same notices."""

    def __init__(self) -> None:
        self._acts: deque[tuple[bytes, bytes]] = deque(maxlen=2 * max(STOP_AT.values()))
        self._error, self._errors = b"", 0
        self._words = 0

    def acted(self, call: str, result: str, *, failed: bool = False, waiting: bool = False) -> Notice | None:
        """Take note of a call (tool and arguments) and its result, both without times and ids.

        `waiting`: the call asks whether something is done by now, so that asking again is right.
        """
        self._words = 0
        self._count_error(result, failed=failed)
        if waiting:
            self._acts.clear()
            return None
        self._acts.append((_digest(call), _digest(result)))
        rounds: dict[Pattern, int] = {
            "same_call": self._same(),
            "alternating": self._alternating(),
            "repeated_error": self._errors,
        }
        return _worst([notice for pattern, count in rounds.items() if (notice := _notice(pattern, count))])

    def spoke(self) -> Notice | None:
        """Take note of an answer that calls no tool and does not finish."""
        self._words += 1
        return _notice("monologue", self._words)

    def _count_error(self, result: str, *, failed: bool) -> None:
        error = _digest(_NUMBERS.sub("#", result)) if failed else b""
        self._errors = self._errors + 1 if failed and error == self._error else int(failed)
        self._error = error

    def _same(self) -> int:
        """Count how often the last act was done in a row."""
        count = 0
        for act in reversed(self._acts):
            if act != self._acts[-1]:
                break
            count += 1
        return count

    def _alternating(self) -> int:
        """Count the rounds of two different acts that the last acts are."""
        acts = list(reversed(self._acts))
        if len(acts) < 2 or acts[0] == acts[1]:
            return 0
        length = next((at for at, act in enumerate(acts) if act != acts[at % 2]), len(acts))
        return length // 2


def _notice(pattern: Pattern, count: int) -> Notice | None:
    """Speak up where the count is one to speak up at: in between, the worker has been told."""
    stop = count >= STOP_AT[pattern]
    return Notice(pattern, GUIDANCE[pattern], stop) if stop or count == WARN_AT[pattern] else None


def _worst(notices: list[Notice]) -> Notice | None:
    return next((notice for notice in notices if notice.stop), next(iter(notices), None))


#: What differs from one time to the next in the same error: numbers, addresses, made-up names.
_NUMBERS = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+", re.IGNORECASE)


def _digest(text: str) -> bytes:
    return sha256(text.encode("utf-8", "surrogatepass")).digest()
