"""A signed link leads to a port of the sandbox while it is good, and to nothing else."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from skep.app.preview import Preview, serving
from skep.sandbox.sandbox import Sandbox
from skep.sessions.links import Links

KEY = b"k" * 32
PORT = 8000


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def served(clock: Clock) -> AsyncIterator[Preview]:
    async with Sandbox.create() as sandbox:
        await sandbox.files.write("index.html", "hello from inside")
        await sandbox.background(f"python3 -m http.server {PORT} --bind 127.0.0.1")
        async with serving(sandbox, Links(KEY), "s-1", PORT, ttl_s=60, now=clock) as preview:
            yield preview


def _ask(url: str, method: str = "GET", cookie: str = "") -> tuple[int, str, str, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request(method, target or "/", headers={"Cookie": cookie} if cookie else {})
        answer = connection.getresponse()
        return (
            answer.status,
            answer.read().decode(),
            answer.headers.get("Location", ""),
            answer.headers.get("Set-Cookie", ""),
        )
    finally:
        connection.close()


async def ask(url: str, method: str = "GET", cookie: str = "") -> tuple[int, str, str, str]:
    return await asyncio.to_thread(_ask, url, method, cookie)


async def visit(link: str) -> str:
    """Follow a link as a browser does, until the server inside answers."""
    for _ in range(200):
        status, _, beyond, _ = await ask(link)
        assert status == 303
        _, _, address, cookie = await ask(beyond)
        status, text, _, _ = await ask(address, cookie=cookie.partition(";")[0])
        if status == 200:
            return text
        await asyncio.sleep(0.05)
    raise AssertionError("the server inside did not answer")


async def test_the_link_leads_inside(served: Preview) -> None:
    assert await visit(served.link) == "hello from inside"


async def test_an_old_link_leads_nowhere(served: Preview, clock: Clock) -> None:
    clock.now += 61
    status, text, beyond, _ = await ask(served.link)
    assert (status, "expired" in text, beyond) == (403, True, "")


@pytest.mark.parametrize(
    ("session", "port", "key"), [("s-2", PORT, KEY), ("s-1", PORT + 1, KEY), ("s-1", PORT, b"x" * 32)]
)
async def test_links_to_other_sessions_and_ports_and_forged_ones_lead_nowhere(
    served: Preview, clock: Clock, session: str, port: int, key: bytes
) -> None:
    other = Links(key).make(session, port, ttl_s=60, now=clock())
    base, _, own = served.link.rpartition("/")
    status, _, beyond, _ = await ask(f"{base}/{other}")
    assert (status, beyond) == (403, "")
    assert (await ask(f"{base}/{own}"))[0] == 303  # the control: a good one is let in at the same door


@pytest.mark.parametrize("path", ["/", "/preview/", "/preview/../preview/x", "/x" * 4000])
async def test_whatever_else_is_asked_gets_nothing(served: Preview, path: str) -> None:
    origin = served.link.partition("/preview/")[0]
    status, _, beyond, _ = await ask(origin + path)
    assert (status in (403, 404), beyond) == (True, "")


async def test_a_link_is_for_looking_only(served: Preview) -> None:
    assert (await ask(served.link, "POST"))[0] == 404


async def test_when_the_serving_ends_the_way_in_does_too(clock: Clock) -> None:
    async with Sandbox.create() as sandbox:
        async with serving(sandbox, Links(KEY), "s-1", PORT, ttl_s=60, now=clock) as preview:
            _, _, beyond, _ = await ask(preview.link)
        for url in (preview.link, beyond):
            with pytest.raises(OSError):
                await ask(url)
