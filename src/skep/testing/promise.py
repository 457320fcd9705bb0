"""What the contract suites are written with: promises about a sandbox, each in an event loop of its own.

The suites need pytest and no plugin of it, so that a mechanism kept in another repository can run them.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pytest

from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox

T = TypeVar("T")
#: No promise takes this long; one that does has hung.
HUNG_S = 60.0


class MakeSandbox(Protocol):
    """The one thing a mechanism gives to its suite: a way to make a sandbox, such as `Sandbox.create`."""

    def __call__(self, *, limits: Limits | None = None) -> Awaitable[Sandbox]: ...


@dataclass(frozen=True, slots=True)
class Gap:
    """A promise that a mechanism does not keep, and why. It is tried all the same, unless trying does harm or hangs."""

    why: str
    tried: bool = True


def promise(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Turn a promise into a test that pytest can run.

    It is called with a fresh `sandbox`, stopped afterwards, or with `make_sandbox` itself if that is what it names.
    Where the suite lists it in `gaps`, by its name or as `name[case]`, it has to fail: a list with more than the truth
    is as false as one with less.
    """
    parameters = dict(inspect.signature(test).parameters)
    wants_one = parameters.pop("sandbox", None) is not None

    def run(self: object, make_sandbox: MakeSandbox, **others: object) -> None:
        gap = _gap(self, test.__name__, others)
        if gap is None:
            asyncio.run(_kept(test, self, make_sandbox, wants_one, others))
        else:
            _broken(gap, lambda: asyncio.run(_kept(test, self, make_sandbox, wants_one, others)))

    factory = inspect.Parameter("make_sandbox", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameters.pop("self"), factory]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*names, *(value for name, value in parameters.items() if name != "make_sandbox")]
    )
    run.__name__, run.__qualname__ = test.__name__, test.__qualname__
    run.__doc__, run.__module__ = test.__doc__, test.__module__
    return run


def _gap(suite: object, name: str, others: dict[str, object]) -> Gap | None:
    gaps: dict[str, Gap] = getattr(suite, "gaps", {})
    cases = [f"{name}[{value}]" for value in others.values()]
    return next((gaps[key] for key in (*cases, name) if key in gaps), None)


def _broken(gap: Gap, attempt: Callable[[], None]) -> None:
    if not gap.tried:
        pytest.skip(f"a gap, not tried: {gap.why}")
    try:
        attempt()
    except Exception:  # noqa: BLE001 - however it fails, it is not kept
        pytest.xfail(gap.why)
    pytest.fail(f"kept after all, so it is no gap: {gap.why}")


async def _kept(
    test: Callable[..., Coroutine[Any, Any, None]],
    suite: object,
    make_sandbox: MakeSandbox,
    wants_one: bool,
    others: dict[str, object],
) -> None:
    async with asyncio.timeout(HUNG_S):
        if not wants_one:
            await test(suite, make_sandbox=make_sandbox, **others)
            return
        async with await make_sandbox() as sandbox:
            await test(suite, sandbox=sandbox, **others)


async def eventually(question: Callable[[], Awaitable[bool]], *, within_s: float = 10.0) -> None:
    """Ask until the answer is yes; fail when it has not come in time."""
    deadline = time.monotonic() + within_s
    while not await question():
        assert time.monotonic() < deadline, f"not so after {within_s} s"
        await asyncio.sleep(0.01)


async def output_of(stream: Any) -> bytes:
    """Read a stream to its end."""
    return b"".join([chunk async for chunk in stream])


async def read_until(stream: Any, mark: bytes) -> bytes:
    """Read a stream until something has appeared in it, and return all that was read."""
    seen = b""
    while mark not in seen:
        chunk = await stream.read()
        assert chunk, f"{mark!r} never came; this did: {seen!r}"
        seen += chunk
    return seen


async def running(sandbox: Sandbox, pid: int) -> bool:
    """Say whether a process inside is there and is no zombie."""
    found = await sandbox.run(f"read -r _ _ state _ < /proc/{pid}/stat && [ $state != Z ]")
    return found.ok
