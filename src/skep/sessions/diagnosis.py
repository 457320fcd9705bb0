"""What to do with a session whose computer does not run, by what is found of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skep.sessions.computers import Condition
from skep.sessions.session import Status

Step = Literal["make", "start", "unarchive", "mend", "refuse"]


@dataclass(frozen=True, slots=True)
class Sight:
    """What is found of a session."""

    status: Status
    workspace: Condition
    #: A sandbox has run over its workspace before, so there is something to lose.
    has_run: bool = False
    #: An archive holds all that the workspace does.
    archived: bool = False
    #: A person, or the hive's upkeep, has said that a missing workspace may be made anew.
    may_recreate: bool = False


def choose(sight: Sight) -> Step:
    """Choose the step that brings the computer back. A workspace that should be there is never made anew unasked."""
    match sight.workspace:
        case "ready":
            return "start"
        case "damaged":
            return "mend"
        case "half-made":
            if sight.archived:
                return "unarchive"  # somebody died while bringing it back
            return "mend" if sight.has_run else "make"
        case "missing":
            return _choose_for_nothing(sight)


def _choose_for_nothing(sight: Sight) -> Step:
    if sight.status == "destroyed":
        return "make"  # a person has deleted it, or it was announced
    if sight.archived:
        return "unarchive"
    return "make" if sight.may_recreate or not sight.has_run else "refuse"


#: Why a session takes each step, for its record.
REASONS: dict[Step, str] = {
    "make": "there is no workspace for this key yet",
    "start": "its sandbox does not run",
    "unarchive": "its workspace is packed away",
    "mend": "its workspace is damaged",
    "refuse": "its workspace is missing",
}
