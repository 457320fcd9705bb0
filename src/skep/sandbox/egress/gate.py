"""The controller's side of the proxy: keep one running while sandboxes need it, and pass on what it says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from skep.sandbox.egress.child import COMMAND, Child
from skep.sandbox.egress.network import Event
from skep.sandbox.egress.passage import Passage
from skep.sandbox.egress.placeholders import unusable

__all__ = ["Gate", "Passage", "gate"]

#: How long until another proxy takes the place of one that died; longer each time if they die young.
_BACK_S, _LONGEST_BACK_S = 0.1, 5.0
_YOUNG_S = 10.0
_FETCH_S = 9.0
_FETCHES = 32


class Gate:
    """The proxy of one event loop, shared by all its sandboxes. It runs while there is one."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._passages: dict[str, Passage] = {}
        self._child: Child | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._turn = 0
        self._fetches: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The proxy's process, if there is one now."""
        return self._child.pid if self._child is not None else None

    async def add(self, passage: Passage) -> None:
        """Let a sandbox out; the first one waits until the proxy serves."""
        self._passages[passage.id] = passage
        if self._keeping is None:
            child = self._start()
            self._keeping = asyncio.ensure_future(self._keep(child))
            await child.ready()
        elif self._child is not None:
            passage.introduce(self._turn)
            await self._child.ready()

    async def drop(self, passage: Passage) -> None:
        """Have no more to do with a sandbox; with the last one the proxy ends."""
        self._passages.pop(passage.id, None)
        if self._passages or self._keeping is None:
            return
        keeping, self._keeping = self._keeping, None
        child, self._child = self._child, None
        keeping.cancel()
        if child is not None:
            await child.end()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Tell the proxy. One that takes the place of another is told anew with the introductions."""
        if self._child is not None:
            self._child.send(message, fds)

    def _start(self) -> Child:
        self._child = Child(self._hear, self._command)
        self._turn += 1
        for passage in self._passages.values():
            passage.introduce(self._turn)
        return self._child

    async def _keep(self, child: Child) -> None:
        """Start another proxy whenever one dies."""
        loop, pause_s = asyncio.get_running_loop(), _BACK_S
        while True:
            began = loop.time()
            await child.ended.wait()
            self._child = None
            for passage in self._passages.values():
                self._inform(passage, Event("proxy_lost", passage.id, {"said": child.said}))
            pause_s = min(2 * pause_s, _LONGEST_BACK_S) if loop.time() - began < _YOUNG_S else _BACK_S
            await asyncio.sleep(pause_s)
            child = await self._start_again()

    async def _start_again(self) -> Child:
        while True:
            try:
                return self._start()
            except OSError:  # no process or descriptor to be had now
                await asyncio.sleep(_LONGEST_BACK_S)

    def _hear(self, message: dict[str, Any]) -> None:
        kind, passage = message.pop("event", None), self._passages.get(str(message.pop("sandbox", "")))
        if passage is None or not isinstance(kind, str):
            return
        if kind != "fetch":
            self._inform(passage, Event(kind, passage.id, message))
        elif len(self._fetches) < _FETCHES * len(self._passages):
            task = asyncio.ensure_future(self._provide(passage, message.get("number"), str(message.get("name"))))
            self._fetches.add(task)
            task.add_done_callback(self._fetches.discard)

    async def _provide(self, passage: Passage, number: object, name: str) -> None:
        value, reason = None, "there is none by that name"
        if (secret := passage.network.secrets.get(name)) is not None:
            reason = "it could not be fetched"
            # Whatever keeps a value from being had, the request is refused. What was said may hold the value.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_FETCH_S):
                    value = await secret.fetch()
                reason = unusable(value) or ""
        if reason:
            self._inform(passage, Event("secret_unavailable", passage.id, {"name": name, "reason": reason}))
        self.send({"do": "secret", "number": number, "value": None if reason else value})

    def _inform(self, passage: Passage, event: Event) -> None:
        # Not called from here: what goes wrong in it must not keep anybody else from hearing.
        asyncio.get_running_loop().call_soon(passage.network.on_event, event)


_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, Gate] = WeakKeyDictionary()


def gate() -> Gate:
    """Return the gate of the running event loop."""
    return _gates.setdefault(asyncio.get_running_loop(), Gate())
