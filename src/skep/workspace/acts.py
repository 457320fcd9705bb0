"""What a holder does with its workspace when another process asks: each act by name, in JSON and out again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from skep.workspace.workspace import START, Workspace

Body = dict[str, Any]
Act = Callable[[Workspace, Mapping[str, Any]], Awaitable[Body]]


async def _checkpoint(workspace: Workspace, asked: Mapping[str, Any]) -> Body:
    made = await workspace.checkpoint(_text(asked, "name"), note=_text(asked, "note") or "")
    return made.model_dump(mode="json")


async def _rollback(workspace: Workspace, asked: Mapping[str, Any]) -> Body:
    return (await workspace.rollback(str(asked.get("to")))).model_dump(mode="json")


async def _forget(workspace: Workspace, asked: Mapping[str, Any]) -> Body:
    await workspace.forget(str(asked.get("name")))
    return {}


async def _diff(workspace: Workspace, asked: Mapping[str, Any]) -> Body:
    return (await workspace.diff(_text(asked, "older") or START, _text(asked, "newer"))).model_dump(mode="json")


async def _suspend(workspace: Workspace, _: Mapping[str, Any]) -> Body:
    return (await workspace.suspend()).model_dump(mode="json")


async def _resume(workspace: Workspace, _: Mapping[str, Any]) -> Body:
    return (await workspace.resume()).model_dump(mode="json")


async def _fetch(workspace: Workspace, asked: Mapping[str, Any]) -> Body:
    return (await workspace.fetch(abandon=asked.get("abandon") is True)).model_dump(mode="json")


def _text(asked: Mapping[str, Any], name: str) -> str | None:
    value = asked.get(name)
    return None if value is None else str(value)


ACTS: dict[str, Act] = {
    "checkpoint": _checkpoint,
    "rollback": _rollback,
    "forget": _forget,
    "diff": _diff,
    "suspend": _suspend,
    "resume": _resume,
    "fetch": _fetch,
}
