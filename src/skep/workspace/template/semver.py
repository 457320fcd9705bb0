"""Ranges of versions as npm writes them: ^1.2, ~1.2.3, 1.x, >=18 <21, 1.2 - 2.3, 18 || 20."""

from __future__ import annotations

import re
from dataclasses import dataclass

from skep.errors import InvalidRequest
from skep.state.names import shown

Version = tuple[int, int, int]

_PART = r"(?:0|[1-9][0-9]{0,8}|[xX*])"
_PARTIAL = re.compile(
    rf"[vV=]?(?P<major>{_PART})(?:\.(?P<minor>{_PART})(?:\.(?P<patch>{_PART})"
    r"(?P<pre>-[0-9A-Za-z.-]{1,60})?(?:\+[0-9A-Za-z.-]{1,60})?)?)?"
)
_COMPARATOR = re.compile(r"(?P<sign>[<>]=?|=|\^|~>?)? *(?P<partial>[^\s<>=^~|]+)(?:\s+|$)")
_HYPHEN = re.compile(r"\s*(\S+)\s+-\s+(\S+)\s*")
_LOWEST: Version = (0, 0, 0)
_BEYOND: Version = (1 << 40, 0, 0)


@dataclass(frozen=True, slots=True)
class Span:
    """Versions from `low` to just below `high`."""

    low: Version = _LOWEST
    high: Version = _BEYOND

    def within(self, other: Span) -> Span:
        return Span(max(self.low, other.low), min(self.high, other.high))


@dataclass(frozen=True, slots=True)
class Range:
    """A range of versions; what follows a hyphen in a version (`-rc.1`) is checked and then left out of account."""

    text: str
    spans: tuple[Span, ...]

    @classmethod
    def parse(cls, text: str) -> Range:
        """Read a range, or raise InvalidRequest if it is none or if no version can be in it."""
        if len(text) > 200 or not text.isprintable():
            raise _not_a_range(text)
        spans = tuple(_alternative(part, text) for part in text.split("||"))
        if not any(span.low < span.high for span in spans):
            raise InvalidRequest(f"no version is in the range {shown(text)}", hint="widen it, such as >=18")
        return cls(text, spans)

    def contains(self, version: str) -> bool:
        """Say whether a version such as 20.11.1 or v20.11.1 is in the range."""
        found = _PARTIAL.fullmatch(version)
        exact = _span("", found).low if found else None
        return exact is not None and any(span.low <= exact < span.high for span in self.spans)


def _alternative(part: str, text: str) -> Span:
    if hyphen := _HYPHEN.fullmatch(part):
        ends = [_PARTIAL.fullmatch(end) for end in hyphen.groups()]
        if ends[0] is None or ends[1] is None:
            raise _not_a_range(text)
        return _span(">=", ends[0]).within(_span("<=", ends[1]))
    span, rest = Span(), part.strip()
    while rest:
        comparator = _COMPARATOR.match(rest)
        partial = _PARTIAL.fullmatch(comparator["partial"]) if comparator else None
        if comparator is None or partial is None:
            raise _not_a_range(text)
        span = span.within(_span(comparator["sign"] or "", partial))
        rest = rest[comparator.end() :]
    return span


def _span(sign: str, partial: re.Match[str]) -> Span:
    numbers = _numbers(partial)
    low, above = _filled(numbers), _above(numbers, len(numbers))
    match sign:
        case ">=":
            return Span(low)
        case ">":
            return Span(above)
        case "<":
            return Span(high=low)
        case "<=":
            return Span(high=above)
        case "^":
            return Span(low, _above(numbers, _first_that_counts(numbers)))
        case "~" | "~>":
            return Span(low, _above(numbers, min(2, len(numbers))))
        case _:
            return Span(low, above)


def _numbers(partial: re.Match[str]) -> list[int]:
    """Return the numbers of a version up to the first that is left open."""
    found: list[int] = []
    for part in (partial["major"], partial["minor"], partial["patch"]):
        if part is None or part in "xX*":
            break
        found.append(int(part))
    return found


def _filled(numbers: list[int]) -> Version:
    major, minor, patch = [*numbers, 0, 0, 0][:3]
    return major, minor, patch


def _above(numbers: list[int], length: int) -> Version:
    """Return the first version that differs in the first `length` numbers."""
    if length == 0:
        return _BEYOND
    return _filled([*numbers[: length - 1], numbers[length - 1] + 1])


def _first_that_counts(numbers: list[int]) -> int:
    return next((place for place, number in enumerate(numbers, 1) if number), len(numbers))


def _not_a_range(text: str) -> InvalidRequest:
    return InvalidRequest(f"{shown(text)} is not a range of versions", hint="write it as 20, ^1.2.3, >=18 or 1.2 - 1.9")
