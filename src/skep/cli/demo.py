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
    """Have a hive carry out a prompt and heal on the way, watch writers append to a log, verify it, catch a forger."""
    import asyncio

    from skep.app.demo import run_demo
    from skep.cli.storyline import Story
    from skep.cli.terminal import console

    start_logging(Environment.read(), file=None)
    screen = console()
    asyncio.run(run_demo(screen, lambda task: Story(task, screen, indent=5), keep=keep))
