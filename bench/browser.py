"""How long a page takes to become text, beside Chromium by itself."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.contest import Contender, compete
from bench.report import Section
from bench.rivals import quiet, timed
from skep.sandbox.browser import Browser
from skep.sandbox.egress.network import Network
from skep.sandbox.sandbox import Sandbox

WARM, COLD = 40, 8
CHROMIUM = "/usr/lib/chromium/chromium"
PAGE = (
    b"<!doctype html><title>Hives</title><h1>Hives</h1>"
    + b"<p>A skep is the woven hive in which beekeepers kept a colony.</p>" * 200
)

METHOD = f"""\
One page of {len(PAGE) / 1000:.0f} kB, served on loopback, is opened and its text read, {WARM} times in a browser
that is open and {COLD} times from the beginning; the contenders take turns. "dump-dom" is
`chromium --headless --dump-dom` on the host from its start to its end: the floor for whoever starts a browser per page.
"Playwright outside" is the same Chromium on the host without a sandbox, asked for the same things: the floor for a
browser that stays open. Skep's browser runs in a sandbox with default limits and reaches the page through the
allow-list.
"""

Act = Callable[[], Awaitable[float]]


@asynccontextmanager
async def site() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(PAGE)}\r\n\r\n"
                writer.write(head.encode() + PAGE)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def network(port: int) -> Network:
    return Network.to("page.test", upstreams={"page.test": f"127.0.0.1:{port}"})


def dump_dom(port: int) -> Act:
    async def act() -> float:
        profile = tempfile.mkdtemp(prefix="skep-bench-")
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
        try:
            return await asyncio.to_thread(
                timed, [CHROMIUM, *flags, "--dump-dom", f"http://127.0.0.1:{port}/"], file_actions=quiet()
            )
        finally:
            shutil.rmtree(profile, ignore_errors=True)

    return act


def in_skep(browser: Browser) -> Act:
    async def act() -> float:
        began = time.perf_counter()
        await browser.navigate("http://page.test/")
        text = await browser.extract_text()
        took = time.perf_counter() - began
        assert text.startswith("Hives")
        return took

    return act


def opened_in(sandbox: Sandbox) -> Act:
    async def act() -> float:
        began = time.perf_counter()
        async with Browser.open(sandbox) as browser:
            await in_skep(browser)()
            return time.perf_counter() - began

    return act


def from_nothing(port: int) -> Act:
    async def act() -> float:
        began = time.perf_counter()
        async with Sandbox.create(network=network(port)) as sandbox, Browser.open(sandbox) as browser:
            await in_skep(browser)()
            return time.perf_counter() - began

    return act


@asynccontextmanager
async def outside(port: int) -> AsyncIterator[Act]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page()

        async def act() -> float:
            began = time.perf_counter()
            await page.goto(f"http://127.0.0.1:{port}/")
            await page.title()
            await page.locator("body").first.inner_text()
            return time.perf_counter() - began

        yield act
        await browser.close()


async def contest() -> list[Contender]:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(site())
        sandbox = await stack.enter_async_context(Sandbox.create(network=network(port)))
        browser = await stack.enter_async_context(Browser.open(sandbox))
        warm = [
            Contender("Playwright outside, warm", await stack.enter_async_context(outside(port)), WARM),
            Contender("Skep, warm: page to text", in_skep(browser), WARM),
        ]
        await compete(warm)
        cold = [
            Contender("dump-dom outside", dump_dom(port), COLD),
            Contender("Skep: browser, page, text in a sandbox that runs", opened_in(sandbox), COLD),
            Contender("Skep: sandbox, browser, page, text", from_nothing(port), COLD),
        ]
        await compete(cold)
        return [*warm, *cold]


def measure() -> Section:
    if not Path(CHROMIUM).exists():
        raise SystemExit("the benchmark of the browser needs Chromium: apt-get install chromium")
    contenders = asyncio.run(contest())
    return Section(
        name="browser",
        title="Browser",
        method=METHOD,
        columns=["what", "median, ms", "p95, ms", "least, ms"],
        rows=[
            [one.name, *(f"{figure * 1000:.0f}" for figure in (one.median, one.p95, one.least))] for one in contenders
        ],
    )
