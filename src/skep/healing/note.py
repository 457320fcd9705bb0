"""Tier 3: say honestly what failed and what was tried, for the person and for later tasks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from skep.healing.failure import Failure, shortened
from skep.healing.history import History
from skep.healing.table import TABLE
from skep.state.events import FailureNoted

_LONGEST_SIGNATURE = 160
_LONGEST_CAUSE = 1_000


@dataclass(frozen=True, slots=True)
class FailureNote:
    """What is to be known about a task that failed for good."""

    signature: str
    tried: tuple[str, ...]
    reflection: str
    root_cause: str
    guidance: str

    def event(self) -> FailureNoted:
        return FailureNoted(
            signature=self.signature,
            tried=self.tried,
            reflection=self.reflection,
            root_cause=self.root_cause,
            guidance=self.guidance,
        )

    def reply(self, *, healing: bool = True) -> str:
        """Write what the person is told."""
        nothing = "there is no remedy for it" if healing else "self-healing is off for this hive"
        tried = "".join(f"\n- {_line(one)}" for one in self.tried) or f"\n- nothing: {nothing}"
        thought = f"\n\nWhat I thought about it: {self.reflection}" if self.reflection else ""
        return f"I could not do this. {self.root_cause}\n\nWhat was tried:{tried}{thought}\n\n{self.guidance}"


def write_note(failure: Failure, history: History, *, reflection: str = "") -> FailureNote:
    """Write the note about the failure that ended a task."""
    row = TABLE[failure.kind]
    return FailureNote(
        signature=signature(failure),
        tried=history.tried,
        reflection=reflection,
        root_cause=f"{row.cause} ({_line(shortened(failure.message, _LONGEST_CAUSE))})",
        guidance=_sentence(failure.hint) if failure.hint else row.guidance,
    )


#: What makes one failure look different from the next of its kind.
_PASSING = re.compile(
    r"(?:/[\w.@+-]+){2,}|0x[0-9a-f]+|\b[0-9a-f-]{12,}\b|\b\d{4,}\b|\b(?:req|msg|tsk|call)_\w+", re.IGNORECASE
)


def signature(failure: Failure) -> str:
    """Return words that are the same for every failure of this sort: no paths, no ids, no long numbers."""
    text = " ".join(_PASSING.sub("#", failure.message).lower().split())
    where = f" {failure.where}" if failure.where else ""
    return f"{failure.kind}{where}: {text[:_LONGEST_SIGNATURE]}".rstrip(": ")


def _line(text: str) -> str:
    return " ".join(text.split())


def _sentence(hint: str) -> str:
    return f"{hint[:1].upper()}{_line(hint[1:]).rstrip('.')}."
