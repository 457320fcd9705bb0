"""Chromium inside a sandbox, on real pages: served on loopback, reached through the allow-list."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.sandbox.inside_server import PORT, ask, served, until

from skep.errors import Denied, InvalidRequest, NotFound, SandboxLost, Unavailable
from skep.sandbox.browser import Browser
from skep.sandbox.egress.network import Event, Network, Secret
from skep.sandbox.egress.tls import Authority, new_authority
from skep.sandbox.sandbox import Sandbox

PAGE = b"""<!doctype html><title>Garden</title>
<h1>The garden</h1> <p id=greeting>Nothing yet.</p> <p hidden>Not shown.</p>
<input id=name> <button onclick="greeting.textContent = 'Hello ' + document.getElementById('name').value">Greet</button>
<button id=slow onclick="setTimeout(() => document.body.append(Object.assign(document.createElement('p'),
 {id: 'late', textContent: 'here at last'})), 300)">Slow</button>
<a id=data href=/data.csv>data</a> <a id=other href=/other target=_blank>other</a>"""
DATA = b"bees,hives\n60000,1\n" * 5000


@pytest.fixture(autouse=True)
def _chromium() -> None:
    """Skip where there is no Chromium or no Playwright; in CI that is a failure."""
    missing = None
    if not Path("/usr/lib/chromium/chromium").exists():
        missing = "Chromium is not installed: apt-get install chromium"
    elif importlib.util.find_spec("playwright") is None:
        missing = "Playwright is not installed: pip install 'skep[browser]'"
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


@dataclass(slots=True)
class Site:
    """A web site on loopback, with what it was asked for."""

    port: int = 0
    asked: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ")[1].decode()
                self.asked.append(path)
                writer.write(self.page(path, head))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def page(self, path: str, head: bytes) -> bytes:
        more, body = "Content-Type: text/html; charset=utf-8", PAGE
        if path == "/data.csv":
            more, body = "Content-Type: text/csv\r\nContent-Disposition: attachment; filename=data.csv", DATA
        elif path == "/other":
            body = b"<title>Other</title>another page"
        elif path == "/head":
            body = b"<pre>" + head
        return f"HTTP/1.1 200 OK\r\n{more}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    def network(self, *allow: str, **more: Any) -> Network:
        hosts = dict.fromkeys(("garden.test", "secret.test"), f"127.0.0.1:{self.port}")
        return Network.to(*(allow or ("garden.test",)), upstreams=hosts, on_event=self.events.append, **more)


@asynccontextmanager
async def serving(context: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    site = Site()
    async with await asyncio.start_server(site.answer, "127.0.0.1", 0, ssl=context) as server:
        site.port = server.sockets[0].getsockname()[1]
        yield site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as served_site:
        yield served_site


@pytest.fixture
async def sandbox(site: Site) -> AsyncIterator[Sandbox]:
    """Give a sandbox with the default limits that may reach the site."""
    async with Sandbox.create(network=site.network()) as made:
        yield made


@pytest.fixture
async def page(sandbox: Sandbox) -> AsyncIterator[Browser]:
    async with Browser.open(sandbox) as browser:
        yield browser


async def test_a_page_is_opened_read_and_used(page: Browser, sandbox: Sandbox) -> None:
    visited = await page.navigate("http://garden.test/")
    assert (visited.url, visited.title, visited.status) == ("http://garden.test/", "Garden", 200)
    text = await page.extract_text()
    assert "The garden" in text
    assert "Not shown" not in text
    await page.type("#name", "Ada")
    await page.click("text=Greet")
    assert await page.extract_text("#greeting") == "Hello Ada"
    await page.click("#slow")
    await page.wait("#late")
    assert await page.extract_text("#late") == "here at last"


async def test_a_picture_is_returned_and_kept(page: Browser, sandbox: Sandbox) -> None:
    await page.navigate("http://garden.test/")
    picture = await page.screenshot("pictures/garden.png")
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack("!II", picture[16:24])
    assert (width, height > 300) == (1280, True)
    assert await sandbox.files.read("pictures/garden.png") == picture


async def test_a_download_lands_in_the_workspace(page: Browser, sandbox: Sandbox) -> None:
    await page.navigate("http://garden.test/")
    for url, click in ((None, "#data"), ("http://garden.test/data.csv", None)):
        got = await page.download(url, click=click)
        assert (got.name, got.path, got.size) == ("data.csv", "/workspace/downloads/data.csv", len(DATA))
        assert await sandbox.files.read(got.path) == DATA
        assert "The garden" in await page.extract_text()
        await sandbox.files.remove(got.path)


async def test_a_file_that_nobody_asked_for_is_not_kept(page: Browser, sandbox: Sandbox, site: Site) -> None:
    await page.navigate("http://garden.test/")
    await page.click("#data")
    assert (await page.download(click="#data")).size == len(DATA)
    assert site.asked.count("/data.csv") == 2
    assert [entry.name for entry in await sandbox.files.list("downloads")] == ["data.csv"]


async def test_a_page_that_a_click_opens_becomes_the_current_one(page: Browser) -> None:
    await page.navigate("http://garden.test/")
    await page.click("#other")
    await page.wait("text=another page")
    assert page.url == "http://garden.test/other"


async def test_a_refused_page_shows_what_was_refused_and_what_is_allowed(page: Browser, site: Site) -> None:
    for address in ("http://denied.test/", "https://denied.test/secret"):
        with pytest.raises(Denied, match=r"denied\.test:\d+ is not on the allow-list") as caught:
            await page.navigate(address)
        assert "garden.test" in caught.value.message
        assert "Skep blocked this request" in await page.extract_text()
    assert {event.details.get("host") for event in site.events if event.kind == "refused"} == {"denied.test"}
    assert site.asked == []


async def test_nothing_goes_out_that_no_page_asked_for(page: Browser, site: Site) -> None:
    await page.navigate("http://garden.test/")
    for _ in range(8):
        await page.navigate("http://garden.test/other")
    assert site.events == []
    assert set(site.asked) <= {"/", "/other", "/favicon.ico"}


async def test_nothing_of_the_browser_stays(sandbox: Sandbox) -> None:
    """No profile, no cache, no file in the workspace, and shortly after no process."""
    places = ["ls", "-A", "/tmp", "/cache", "/workspace", "/dev/shm"]
    before = (await sandbox.run(places)).text
    async with Browser.open(sandbox) as page:
        await page.navigate("http://garden.test/")
        assert "chromium-" in (await sandbox.run(places)).text
        assert (await sandbox.run(["ps", "-eo", "args="])).text.count("chromium") > 2
    assert (await sandbox.run(places)).text == before

    async def all_ended() -> bool:
        return "chrom" not in (await sandbox.run(["ps", "-eo", "args="])).text

    await until(all_ended)


async def test_each_browser_starts_afresh(sandbox: Sandbox) -> None:
    async with Browser.open(sandbox) as first, Browser.open(sandbox) as second:
        await first.navigate("http://garden.test/")
        await first._page.evaluate("document.cookie = 'a=1'")
        await second.navigate("http://garden.test/head")
        assert "a=1" not in await second.extract_text()
        await first.navigate("http://garden.test/head")
        assert "Cookie: a=1" in await first.extract_text()


async def test_certificates_are_checked_save_those_of_the_sandbox_itself(tmp_path: Path) -> None:
    """A host that the proxy speaks for is trusted; one with a certificate of its own making is not."""
    key, certificate = new_authority()
    (tmp_path / "trust.pem").write_bytes(certificate)
    authority = Authority(key, certificate)

    async def fetch() -> str:
        return "the-real-value"

    async with serving(authority.context("secret.test")) as site:
        secret = Secret("secret.test", "Authorization", fetch)
        network = replace(site.network("garden.test", secrets={"KEY": secret}), trust=str(tmp_path / "trust.pem"))
        async with Sandbox.create(network=network) as sandbox, Browser.open(sandbox) as page:
            assert (await page.navigate("https://secret.test/other")).status == 200
            assert await page.extract_text() == "another page"
            with pytest.raises(Unavailable, match="ERR_CERT"):
                await page.navigate("https://garden.test/")


async def test_mistakes_are_named(page: Browser) -> None:
    await page.navigate("http://garden.test/")
    with pytest.raises(NotFound, match=r"waiting for #absent was not done within 0\.2 s"):
        await page.wait("#absent", timeout_s=0.2)
    with pytest.raises(NotFound, match="clicking #absent"):
        await page.click("#absent", timeout_s=0.2)
    with pytest.raises(InvalidRequest, match="selector"):
        await page.click("##")
    with pytest.raises(InvalidRequest, match="cannot be opened"):
        await page.navigate("javascript:alert(1)")
    with pytest.raises(InvalidRequest, match="shown as a page"):
        await page.download("http://garden.test/other")
    with pytest.raises(InvalidRequest, match="an address or from a click"):
        await page.download()
    with pytest.raises(Unavailable, match="ERR_CONNECTION_REFUSED"):
        await page.navigate("http://garden.test:81/")
    assert (await page.navigate("http://garden.test/other")).title == "Other"


async def test_a_sandbox_without_a_network_shows_its_own_pages_alone() -> None:
    async with Sandbox.create() as sandbox, Browser.open(sandbox) as page:
        await sandbox.files.write("page.html", "<title>Own</title>of the workspace")
        assert (await page.navigate("file:///workspace/page.html")).title == "Own"
        async with served(sandbox):
            assert "GET /echo" in (await _text(page, f"http://127.0.0.1:{PORT}/echo"))
        with pytest.raises(Unavailable):
            await page.navigate("http://garden.test/")


async def _text(page: Browser, url: str) -> str:
    await page.navigate(url)
    return await page.extract_text()


async def test_a_lost_sandbox_is_told_of_and_the_block_ends() -> None:
    async with Sandbox.create() as sandbox, Browser.open(sandbox) as page:
        await sandbox.stop()
        with pytest.raises(SandboxLost):
            await page.navigate("about:blank", timeout_s=5)


async def test_a_browser_that_dies_is_told_of(page: Browser, sandbox: Sandbox) -> None:
    await sandbox.kill_all()
    with pytest.raises(Unavailable, match="closed"):
        await page.navigate("http://garden.test/", timeout_s=10)
    assert await sandbox.alive()


async def test_a_real_browser_uses_an_exposed_port_and_other_pages_in_it_cannot() -> None:
    """Opened by its link from another site it lets the visitor stay; that site's own scripts get nothing."""
    from playwright.async_api import async_playwright

    script = """async ([address, mark]) => {
        const socket = await new Promise(done => {
            const ws = new WebSocket(address.replace('http', 'ws') + 'upgrade');
            ws.onopen = () => done('open'); ws.onerror = () => done('refused'); });
        await fetch(address + 'echo?' + mark, {credentials: 'include', mode: 'no-cors'});
        return socket;
    }"""
    async with (
        serving() as elsewhere,
        Sandbox.create() as sandbox,
        served(sandbox),
        await sandbox.expose(PORT) as exposure,
        async_playwright() as playwright,
    ):
        browser = await playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            await page.goto(f"http://localhost:{elsewhere.port}/other")
            await page.evaluate("link => { location.href = link }", exposure.link.replace("/?", "/echo?"))
            await page.wait_for_url(f"{exposure.url}echo")
            seen = await page.inner_text("body")
            assert seen.startswith("GET /echo HTTP/1.1")
            assert exposure.token not in seen
            assert await page.evaluate(script, [exposure.url, "own-page"]) == "open"
            for host in ("localhost", "127.0.0.1"):
                await page.goto(f"http://{host}:{elsewhere.port}/other")
                assert await page.evaluate(script, [exposure.url, "other-page"]) == "refused"
            arrived = [(await ask(exposure, f"/saw?{mark.hex()}")).text for mark in (b"own-page", b"other-page")]
            assert arrived == ["yes", "no"]
        finally:
            await browser.close()
