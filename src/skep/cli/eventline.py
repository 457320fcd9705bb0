"""One event of the log as a line for people and as JSON for programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from skep.cli.terminal import console, printable
from skep.state.wire import as_json

if TYPE_CHECKING:
    from rich.text import Text

    from skep.state.events import Recorded

_COLOURS = {"prompted": "cyan", "replied": "green", "failed": "red", "noted": "yellow"}


def gist(recorded: Recorded) -> str:
    """Say on one line what happened."""
    body: Any = recorded.event.model_dump(mode="json", exclude={"type", "v"})
    if len(body) == 1:
        (body,) = body.values()
    if isinstance(body, dict):
        body = " ".join(f"{name}={_word(value)}" for name, value in body.items())
    return " ".join(str(body).split())


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def styled(recorded: Recorded) -> Text:
    """Lay the line out for a terminal."""
    from rich.text import Text

    kind = recorded.event.type
    return Text.assemble(
        (f"{recorded.seq:>6}  ", "dim"),
        (f"{recorded.at:%Y-%m-%d %H:%M:%S}  ", "dim"),
        (f"{kind:<20}", _COLOURS.get(kind, "magenta")),
        (f"{printable(recorded.actor):<14} ", "dim"),
        printable(gist(recorded)),
    )


def plain(recorded: Recorded) -> str:
    """Lay the line out for a pipe: separated by tabs, nothing cut."""
    at = recorded.at.isoformat().replace("+00:00", "Z")
    cells = (str(recorded.seq), at, recorded.event.type, recorded.actor, gist(recorded))
    return "\t".join(map(printable, cells))


class EventPrinter:
    """Prints events one by one, in the form that suits stdout."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = None
        if not as_json and sys.stdout.isatty():
            self._console = console()

    def __call__(self, recorded: Recorded) -> None:
        if self._console is not None:
            self._console.print(styled(recorded), no_wrap=True, overflow="ellipsis")
        elif self._as_json:
            sys.stdout.write(json.dumps(as_json(recorded), ensure_ascii=False) + "\n")
        else:
            sys.stdout.write(plain(recorded) + "\n")
