"""What is on record about a failed attempt: what was done, and what was executed that tells right from wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from pydantic import JsonValue

from skep.healing.failure import Check, shortened
from skep.state.events import Event, Healed, LoopWarned, Observed, Proposed, Ruled

#: Of a trajectory, the last so many lines are shown, each no longer than that.
MOST_LINES = 24
LONGEST_LINE = 600


def check_of(observation: Mapping[str, JsonValue]) -> Check | None:
    """Read what an observation says about being right: an exit code, a status, the outcome of a cell."""
    output = _joined(observation, "stdout", "stderr", "error", "message")
    named = observation.get("tool") or observation.get("skill") or observation.get("kind")
    match observation:
        case {"status": int(status)}:  # what it says itself goes before the exit code of what said it
            return Check(f"{named}, status {status}", status < 400, output)
        case {"exit_code": int(code)}:
            return Check(f"{named}, exit code {code}", code == 0, output)
        case {"kind": "cell_ran", "outcome": str(outcome)}:
            return Check(f"cell, {outcome}", outcome == "ok", output)
    return None


def latest_check(events: Iterable[Event]) -> Check | None:
    """Return what was executed last, among the observations of an attempt."""
    checks = [check_of(event.observation) for event in events if isinstance(event, Observed)]
    return next((check for check in reversed(checks) if check is not None), None)


def trajectory(events: Iterable[Event]) -> str:
    """Tell an attempt in lines, one for each thing that happened; of a long one, its end."""
    lines = [shortened(line, LONGEST_LINE) for event in events if (line := _line(event))]
    left_out = [f"({len(lines) - MOST_LINES} earlier lines left out)"] if len(lines) > MOST_LINES else []
    return "\n".join(left_out + lines[-MOST_LINES:])


def _line(event: Event) -> str:
    match event:
        case Proposed(step=step, action=action, text=text):
            return f"{step}. {text.strip()} -> {_flat(action)}" if text.strip() else f"{step}. {_flat(action)}"
        case Ruled(step=step, ruling="deny", why=why):
            return f"{step}. denied: {why}"
        case Observed(step=step, observation=observation):
            return f"{step}. = {_flat(observation)}"
        case LoopWarned(step=step, pattern=pattern):
            return f"{step}. warned: {pattern}"
        case Healed(failure=failure, remedy=remedy, detail=detail):
            return f"failure: {failure}, remedy: {remedy} ({detail})"
        case _:
            return ""


def _flat(value: Mapping[str, JsonValue]) -> str:
    """Show what matters of an action or an observation, in one line."""
    shown = {name: one for name, one in value.items() if name != "stamp" and one not in (None, "", [], False)}
    return json.dumps(shown, ensure_ascii=False)


def _joined(observation: Mapping[str, JsonValue], *names: str) -> str:
    texts = (observation.get(name) for name in names)
    return "\n".join(text for text in texts if isinstance(text, str) and text)
