"""skep demo: see it work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skep.cli.desk import start_logging
from skep.cli.terminal import examples
from skep.config.environment import Environment

EPILOG = examples(
    "skep demo  # in a throwaway folder",
    "skep demo --keep /tmp/skep-demo  # leave the folder behind, to look around in it",
)


def demo(
    keep: Annotated[
        Path | None,
        typer.Option("--keep", help="Use this new folder and keep it.", metavar="FOLDER", show_default=False),
    ] = None,
) -> None:
    """Make a hive, watch several writers append to its log at once, verify it, and catch a forger."""
    import asyncio

    from skep.app.demo import run_demo
    from skep.cli.terminal import console

    start_logging(Environment.read(), file=None)
    asyncio.run(run_demo(console(), keep=keep))
