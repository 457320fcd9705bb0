"""Where there is no sandbox, everything that needs one says so, and what does not goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from skep.errors import SandboxDisabled
from skep.sandbox.sandbox import Sandbox

CALLS: dict[str, Callable[[Sandbox], Awaitable[object]]] = {
    "run": lambda sandbox: sandbox.run("true"),
    "start": lambda sandbox: sandbox.start(["true"]),
    "background": lambda sandbox: sandbox.background("true"),
    "shell": lambda sandbox: sandbox.shell(),
    "pause": lambda sandbox: sandbox.pause(),
    "resume": lambda sandbox: sandbox.resume(),
    "kill_all": lambda sandbox: sandbox.kill_all(),
    "connect": lambda sandbox: sandbox.connect(80),
    "expose": lambda sandbox: sandbox.expose(80),
    "admit": lambda sandbox: sandbox.admit(),
    "read": lambda sandbox: sandbox.files.read("file"),
    "write": lambda sandbox: sandbox.files.write("file", b""),
    "append": lambda sandbox: sandbox.files.append("file", b""),
    "list": lambda sandbox: sandbox.files.list(),
    "stat": lambda sandbox: sandbox.files.stat("file"),
    "move": lambda sandbox: sandbox.files.move("file", "other"),
    "remove": lambda sandbox: sandbox.files.remove("file"),
    "mkdir": lambda sandbox: sandbox.files.mkdir("folder"),
}


@pytest.mark.parametrize("call", CALLS)
async def test_every_call_is_refused_with_a_hint(call: str) -> None:
    options = {"reason": "the sandbox of hive garden is switched off", "hint": "switch it on"}
    async with Sandbox.create(mechanism="disabled", options=options) as sandbox:
        with pytest.raises(SandboxDisabled, match="garden is switched off") as refused:
            await CALLS[call](sandbox)
    assert refused.value.hint == "switch it on"


async def test_streams_and_watches_are_refused_too() -> None:
    async with Sandbox.create(mechanism="disabled") as sandbox:
        for begin in (sandbox.files.stream, sandbox.files.watch):
            with pytest.raises(SandboxDisabled, match="switched off here"):
                begin("file")


async def test_it_is_not_alive_and_ends_in_peace() -> None:
    sandbox = await Sandbox.create(mechanism="disabled")
    assert not await sandbox.alive() and not await sandbox.occupied()
    await sandbox.gone()
    await sandbox.stop()
    await sandbox.stop()
