"""What `Sandbox.create` returns: a sandbox to be, for whichever way of waiting the caller has."""

from __future__ import annotations

from collections.abc import Generator
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from skep.errors import InvalidRequest
from skep.sandbox.blocking import BlockingSandbox
from skep.sandbox.recipe import Recipe

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Sandbox


class Starts(Protocol):
    """The one thing that a mechanism's module has to offer."""

    async def start(self, recipe: Recipe) -> Sandbox: ...


#: The module of each mechanism, found by name: the contract does not know who implements it.
MECHANISMS = {
    "bubblewrap": "skep.sandbox.bubblewrap",
    "docker": "skep.sandbox.docker",
    "gvisor": "skep.sandbox.gvisor",
    "local": "skep.sandbox.local",
    "disabled": "skep.sandbox.disabled",
    "e2b": "skep.sandbox.e2b",
    "daytona": "skep.sandbox.daytona",
}


class Creation:
    """Await it, or enter it with `async with` or `with`; it is used once."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._made: Sandbox | None = None
        self._blocking: BlockingSandbox | None = None

    def __await__(self) -> Generator[object, None, Sandbox]:
        return self._start().__await__()

    async def __aenter__(self) -> Sandbox:
        self._made = await self._start()
        return self._made

    async def __aexit__(self, *_: object) -> None:
        if self._made is not None:
            await self._made.stop()

    def __enter__(self) -> BlockingSandbox:
        self._blocking = BlockingSandbox.start(self._start)
        return self._blocking

    def __exit__(self, *_: object) -> None:
        if self._blocking is not None:
            self._blocking.stop()

    async def _start(self) -> Sandbox:
        name = self._recipe.mechanism
        if name not in MECHANISMS:
            raise InvalidRequest(
                f"there is no sandbox mechanism {name[:60]!r}", hint=f"use one of {', '.join(MECHANISMS)}"
            )
        return await cast(Starts, import_module(MECHANISMS[name])).start(self._recipe)
