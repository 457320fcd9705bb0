"""Leave alone for a while what keeps failing: one circuit for each provider, and for each tool of a hive.

closed: calls go through, and the outcomes of the last minute are kept. open: too many failed, nothing is called.
half-open: the rest is over, and one call may try; it closes the circuit or opens it anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from skep.healing.failure import FailureKind
from skep.healing.table import TABLE

State = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """When a circuit opens: `share` of at least `least` calls within `window_s` failed. It rests for `rest_s`."""

    window_s: float = 60.0
    least: int = 5
    share: float = 0.5
    rest_s: float = 30.0


USUAL = Tolerance()

#: Outcomes that are kept of one circuit: a busy one is judged by its latest.
_MOST_OUTCOMES = 200
#: From how many circuits on those are forgotten that have nothing to tell any more.
_MANY_CIRCUITS = 1_000


@dataclass(slots=True)
class _Circuit:
    outcomes: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=_MOST_OUTCOMES))
    opened_at: float | None = None
    probed_at: float | None = None


class Breakers:
    """The circuits of one process, by what is called: `provider:openai`, `tool:hiv_…:browse`."""

    def __init__(self, tolerance: Tolerance = USUAL, *, now: Callable[[], float] = time.monotonic) -> None:
        self._tolerance = tolerance
        self._now = now
        self._circuits: dict[str, _Circuit] = {}

    def state(self, key: str) -> State:
        circuit = self._circuits.get(key)
        if circuit is None or circuit.opened_at is None:
            return "closed"
        return "open" if self._now() - circuit.opened_at < self._tolerance.rest_s else "half-open"

    def is_open(self, key: str) -> bool:
        """Tell whether a call would be turned away now."""
        return not self._admits(key)

    def rests_s(self, key: str) -> float:
        """Tell for how long calls will be turned away, unless a probe closes the circuit before."""
        circuit = self._circuits.get(key)
        if circuit is None or circuit.opened_at is None or self._admits(key):
            return 0.0
        since = circuit.opened_at if circuit.probed_at is None else circuit.probed_at
        return max(0.0, since + self._tolerance.rest_s - self._now())

    def begin(self, key: str) -> bool:
        """Ask whether a call may be made; of a half-open circuit, the one that gets a yes is the probe.

        A probe that never says how it went is given up after another rest.
        """
        if not self._admits(key):
            return False
        if self.state(key) == "half-open":
            self._circuits[key].probed_at = self._now()
        return True

    def succeeded(self, key: str) -> None:
        """Take note of a call that went well; it closes a half-open circuit."""
        if self.state(key) == "half-open":
            self._circuits[key] = _Circuit()
        else:
            self._note(key, failed=False)

    def failed(self, key: str, kind: FailureKind) -> None:
        """Take note of a failure; only those that speak against what was called count, see the decision table."""
        if TABLE[kind].breaks:
            self._note(key, failed=True)
        elif self.state(key) == "half-open":
            self._circuits[key].probed_at = None

    def _admits(self, key: str) -> bool:
        match self.state(key):
            case "closed":
                return True
            case "open":
                return False
            case "half-open":
                probed = self._circuits[key].probed_at
                return probed is None or self._now() - probed >= self._tolerance.rest_s

    def _note(self, key: str, *, failed: bool) -> None:
        if key not in self._circuits and len(self._circuits) >= _MANY_CIRCUITS:
            self._forget_idle()
        circuit, now = self._circuits.setdefault(key, _Circuit()), self._now()
        circuit.outcomes.append((now, failed))
        if not failed:
            return
        if self.state(key) == "half-open" or self._is_too_much(circuit, now):
            circuit.opened_at, circuit.probed_at = now, None

    def _is_too_much(self, circuit: _Circuit, now: float) -> bool:
        recent = [failed for at, failed in circuit.outcomes if now - at <= self._tolerance.window_s]
        return len(recent) >= self._tolerance.least and sum(recent) >= self._tolerance.share * len(recent)

    def _forget_idle(self) -> None:
        """Forget the circuits of which nothing was heard for so long that they let a call through anyway."""
        since = self._now() - max(self._tolerance.window_s, self._tolerance.rest_s)
        lively = [(key, one) for key, one in self._circuits.items() if one.outcomes and one.outcomes[-1][0] >= since]
        self._circuits = dict(lively)
