"""The commands a person types; no logic."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    arguments = sys.argv[1:]
    if arguments in (["--version"], ["-V"]):
        # Answered before anything heavy is imported: scripts ask for the version often.
        from skep import __version__

        sys.stdout.write(f"skep {__version__}\n")
        return
    from skep.cli.run import run

    sys.exit(run(arguments))
