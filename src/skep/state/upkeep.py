"""How a hive is kept: which threads share a computer, what isolates it, when it is put away, and how it takes work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

from skep.errors import InvalidRequest
from skep.state.names import shown

Threads = Literal["hive", "thread"]
#: What becomes of a prompt whose thread has a task that is not done: it waits, is refused, ends the other, or ends it
#: and undoes what it did to the workspace.
SameThread = Literal["enqueue", "reject", "interrupt", "rollback"]
SAME_THREAD: tuple[SameThread, ...] = get_args(SameThread)
Value = bool | int | str | list[str] | None

#: As `skep.sandbox.mechanisms` has them, which is not imported from here.
MECHANISMS = ("bubblewrap", "docker", "gvisor", "e2b", "daytona", "local")
ISOLATION = ("none", "namespaces", "kernel", "machine")

#: The longest that each time can be, so that a slip of the finger is not a promise for centuries.
_MOST = {"stop_after_s": 86_400, "archive_after_s": 31_536_000, "delete_after_days": 3_650}


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What a hive has chosen, or the usual.

    Times count from the last use. A session that is not used is stopped, then packed away, and deleted in the end.
    """

    #: Whether the threads of the hive share one workspace, or have one each.
    threads: Threads = "hive"
    stop_after_s: int = 300
    archive_after_s: int = 1_800
    delete_after_days: int = 90
    #: Whether a workspace that is missing may be made anew without asking a person.
    recreate_missing: bool = False
    #: What isolates its sandboxes, what does where that cannot, and the least isolation; None: as the settings say.
    sandbox_mechanism: str | None = None
    sandbox_fallback: tuple[str, ...] | None = None
    sandbox_isolation: str | None = None
    #: What becomes of a prompt whose thread is busy.
    same_thread: SameThread = "enqueue"
    #: Whether its workers may use a browser.
    browser: bool = False

    def changed(self, changes: Mapping[str, object]) -> Upkeep:
        """Return this upkeep with some of it set; raise InvalidRequest for a value that cannot be."""
        for name, value in changes.items():
            _check(name, value)
        given: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in changes.items()}
        return Upkeep(**(asdict(self) | given))

    def since(self, before: Upkeep) -> dict[str, Value]:
        """Return what differs from `before`, with its value now, for JSON."""
        now = {name: getattr(self, name) for name in UPKEEP if getattr(self, name) != getattr(before, name)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in now.items()}

    def text(self) -> str:
        """Return what differs from the usual, as it is stored: the usual may change with a newer Skep."""
        return json.dumps(self.since(USUAL), sort_keys=True)

    @classmethod
    def read(cls, text: str) -> Upkeep:
        """Read what was stored; what a newer Skep may have added is left alone."""
        stored = cast(dict[str, object], json.loads(text))
        return USUAL.changed({name: value for name, value in stored.items() if name in UPKEEP})


UPKEEP = tuple(field.name for field in fields(Upkeep))
USUAL = Upkeep()


def _check(name: str, value: object) -> None:
    match name:
        case "threads":
            fits, wanted = value in ("hive", "thread"), "hive or thread"
        case "same_thread":
            fits, wanted = value in SAME_THREAD, f"one of {', '.join(SAME_THREAD)}"
        case "recreate_missing" | "browser":
            fits, wanted = isinstance(value, bool), "on or off"
        case "sandbox_mechanism":
            fits, wanted = value is None or value in MECHANISMS, f"default, or one of {', '.join(MECHANISMS)}"
        case "sandbox_fallback":
            fits, wanted = value is None or _are_mechanisms(value), f"default, or some of {', '.join(MECHANISMS)}"
        case "sandbox_isolation":
            fits, wanted = value is None or value in ISOLATION, f"default, or one of {', '.join(ISOLATION)}"
        case _:
            fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST[name]
            wanted = f"a whole number from 1 to {_MOST[name]}"
    if not fits:
        raise InvalidRequest(f"{name} cannot be {shown(str(value))}", hint=f"give {wanted}")


def _are_mechanisms(value: object) -> bool:
    known = isinstance(value, list | tuple) and all(name in MECHANISMS for name in value)
    return known and len(set(cast(list[str], value))) == len(cast(list[str], value))
