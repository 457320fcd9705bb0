"""The tasks of a home for a command: at its server, or in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from skep.app import presence
from skep.config import Environment, Settings

if TYPE_CHECKING:
    from skep.app.apiary import Tell
    from skep.app.carrier import Carrier


@asynccontextmanager
async def open_carrier(
    environment: Environment, settings: Settings, account_id: str, *, actor: str, tell: Tell
) -> AsyncIterator[Carrier]:
    """Go to the server of this home if one runs; else open the state in this process."""
    server = presence.find(environment.paths, settings)
    if server is not None:
        presence.check_version(server)
        from skep.app.remote import open_remote

        async with open_remote(server, environment.paths.home, account_id, actor=actor) as remote:
            yield remote
        return
    # What follows takes long to load, and a command that goes to a server has no use for it.
    from skep.app.local import LocalTasks
    from skep.app.program import open_program

    async with open_program(environment.paths, settings) as program:
        yield LocalTasks(program, environment, account_id, actor=actor, tell=tell)
