"""Read cells from a person at a terminal."""

from __future__ import annotations

import codeop
import readline

from skep.cli.terminal import console


def read_cell(number: int) -> str | None:
    """Return the next cell, or None when the person leaves with Ctrl-D; Ctrl-C throws away what was typed."""
    readline.set_auto_history(True)
    lines: list[str] = []
    while True:
        try:
            line = input("... " if lines else f"[{number}] ")
        except EOFError:
            console().print()
            return None
        except KeyboardInterrupt:
            console().print()
            lines.clear()
            continue
        lines.append(line)
        if _complete(lines):
            return "\n".join(lines)


def _complete(lines: list[str]) -> bool:
    """Say whether the lines are a cell: an empty line ends a block, a magic of a whole cell ends with one too."""
    source = "\n".join(lines)
    if lines[0].startswith("%%"):
        return len(lines) > 1 and not lines[-1].strip()
    if lines[0].lstrip().startswith(("!", "%")):
        return not lines[-1].endswith("\\")
    try:
        return codeop.compile_command(source, symbol="exec") is not None and (
            len(lines) == 1 or not lines[-1].strip() or not lines[-1].startswith((" ", "\t"))
        )
    except (SyntaxError, ValueError, OverflowError):
        return True  # the kernel says what is wrong with it
