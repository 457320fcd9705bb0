"""Say what was found, as a line of JSON on the guest's second serial port."""

from __future__ import annotations

import json
import time
from typing import Any

PORT = "/dev/ttyS1"
#: The trial that is none: all have been made.
END = "the end"
#: The ordinary user of the guest.
USER = 1000
#: How long a trial may take before it counts as hung.
TRIAL_S = 60


def say(name: str, found: dict[str, Any]) -> None:
    with open(PORT, "w") as port:
        port.write(json.dumps({"trial": name, "at_s": round(time.monotonic(), 1), **found}) + "\n")


def say_end() -> None:
    say(END, {})


def say_printed(name: str, code: int | None, printed: str) -> None:
    """Report the last line that a trial printed, or why there is none."""
    if code == 0 and printed.strip():
        say(name, json.loads(printed.splitlines()[-1]))
    else:
        say(name, {"error": f"exit {code}", "printed": printed[-2000:]})


if __name__ == "__main__":
    say_end()
