"""Sandboxes on other machines, whichever cloud has them: made to be kept, found again, and given up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol, cast

from skep.errors import NotFound
from skep.sandbox.creation import MECHANISMS
from skep.sandbox.recipe import Recipe
from skep.sandbox.stream import StreamSandbox

#: What is settled when a machine is made, and cannot be asked of one that is there.
_AT_FIRST = ("volumes",)


class Cloud(Protocol):
    """What the module of such a mechanism offers."""

    async def start(self, recipe: Recipe) -> StreamSandbox: ...

    async def forget(self, told: Mapping[str, Any], *, machine: str | None, labels: Mapping[str, str]) -> None: ...

    async def volumes(self, told: Mapping[str, Any]) -> list[str]: ...


async def make(recipe: Recipe) -> StreamSandbox:
    """Start a sandbox on a new machine, which is kept until it is given up."""
    return await _cloud(recipe.mechanism).start(_with(recipe, {**recipe.options, "keep": True}))


async def rejoin(recipe: Recipe, machine: str) -> StreamSandbox | None:
    """Start a sandbox on a machine that is there, halted or not; None if it is gone."""
    told = {name: value for name, value in recipe.options.items() if name not in _AT_FIRST}
    try:
        return await _cloud(recipe.mechanism).start(_with(recipe, {**told, "keep": True, "sandbox_id": machine}))
    except NotFound:
        return None


async def forget(mechanism: str, options: Mapping[str, Any], *, machine: str | None, labels: Mapping[str, str]) -> None:
    """End a machine by its id, or all that have these labels."""
    await _cloud(mechanism).forget(options, machine=machine, labels=labels)


async def volumes(mechanism: str, options: Mapping[str, Any]) -> list[str]:
    """Return the names of the volumes that a cloud has; a sandbox gets one by the option `volumes`."""
    return await _cloud(mechanism).volumes(options)


def _cloud(mechanism: str) -> Cloud:
    return cast(Cloud, import_module(MECHANISMS[mechanism]))


def _with(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    return replace(recipe, options=options)
