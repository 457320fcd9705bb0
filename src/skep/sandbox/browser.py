"""A web browser: Debian's Chromium inside a sandbox, driven from outside by Playwright.

Chromium reaches what the sandbox may reach and nothing else. Its own sandbox is off, since ours forbids the nested
namespaces that it would need and already holds it. What it sends to Playwright is hostile input all the same: no
path or name from it is used on the host, only inside.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from skep.errors import (
    Denied,
    InvalidRequest,
    LimitReached,
    NotFound,
    SandboxLost,
    SandboxUnusable,
    SkepError,
    Unavailable,
)
from skep.sandbox.chromium import Chromium
from skep.sandbox.ports import Bounds
from skep.sandbox.sandbox import Sandbox

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, CDPSession, Page, Playwright, Response

DOWNLOADS = "/workspace/downloads"
_SCHEMES = ("http:", "https:", "file:", "data:", "about:")
_TEXT_LIMIT = 1_000_000
_MESSAGE_LIMIT = 1_000
_ERROR_PAGE_MS = 2_000
#: Between two acts a model may think for long.
_BOUNDS = Bounds(connections=8, idle_s=7 * 24 * 3600)

Problem = type[SkepError]
LoadState = Literal["load", "domcontentloaded", "networkidle"]


@dataclass(frozen=True, slots=True)
class Visited:
    """Where a navigation ended; `status` is that of the answer, None for an address without one."""

    url: str
    title: str
    status: int | None


@dataclass(frozen=True, slots=True)
class Download:
    """A file that the browser has put into the workspace."""

    name: str
    path: str
    size: int


class Browser:
    """One browser window with a profile of its own, which is gone afterwards. Make one with `Browser.open`."""

    def __init__(
        self, sandbox: Sandbox, chromium: Chromium, context: BrowserContext, session: CDPSession, timeout_s: float
    ) -> None:
        self._sandbox = sandbox
        self._chromium = chromium
        self._context = context
        self._session = session
        self._timeout_s = timeout_s
        self._page: Page = context.pages[0]
        self._opened = asyncio.Event()
        context.on("page", self._follow)

    @classmethod
    @asynccontextmanager
    async def open(cls, sandbox: Sandbox, *, timeout_s: float = 30.0) -> AsyncIterator[Browser]:
        """Start Chromium in a sandbox; it ends with the block. `timeout_s` is the default of every act."""
        async with AsyncExitStack() as stack:
            # Both take their time, so they start together.
            starting = asyncio.ensure_future(_start_driver())
            stack.push_async_callback(_stop_driver, starting)
            chromium = await stack.enter_async_context(Chromium.start(sandbox, timeout_s=timeout_s))
            driver = await asyncio.shield(starting)
            port = await stack.enter_async_context(await sandbox.expose(chromium.port, bounds=_BOUNDS))
            address = port.url.replace("http:", "ws:", 1).rstrip("/") + chromium.path
            with _explained("connecting to Chromium", timeout_s, Unavailable):
                connection = await driver.chromium.connect_over_cdp(
                    address, headers=port.headers, timeout=timeout_s * 1000
                )
                session = await connection.new_browser_cdp_session()
                await _allow_downloads(session, allow=False)
            yield cls(sandbox, chromium, connection.contexts[0], session, timeout_s)

    @property
    def url(self) -> str:
        """The address of the page that is shown."""
        return self._page.url

    async def navigate(self, url: str, *, timeout_s: float | None = None) -> Visited:
        """Open an address and wait until it has loaded.

        One that the allow-list refuses is `Denied`, with the message of the refusal, which the page shows too.
        """
        if not url.lower().startswith(_SCHEMES):
            raise InvalidRequest(f"{url[:100]!r} cannot be opened", hint="give a whole address, such as https://…")
        async with self._acting(f"opening {url[:200]}", timeout_s) as limit_ms:
            response = await self._go(url, limit_ms)
            return Visited(self._page.url, await self._page.title(), response.status if response else None)

    async def wait(
        self, selector: str | None = None, *, state: LoadState = "load", timeout_s: float | None = None
    ) -> None:
        """Wait until something that matches a selector is visible; without one, until the page is as loaded as told."""
        async with self._acting(f"waiting for {selector or state}", timeout_s, late=NotFound) as limit_ms:
            if selector is None:
                await self._page.wait_for_load_state(state, timeout=limit_ms)
            else:
                await self._page.locator(selector).first.wait_for(timeout=limit_ms)

    async def screenshot(
        self, path: str | None = None, *, whole: bool = False, timeout_s: float | None = None
    ) -> bytes:
        """Return a picture (PNG) of the window, or of the whole page; with a path, put it into the workspace too."""
        async with self._acting("taking a picture", timeout_s) as limit_ms:
            picture = await self._page.screenshot(full_page=whole, timeout=limit_ms)
        if path is not None:
            await self._sandbox.files.write(path, picture)
        return picture

    async def extract_text(self, selector: str | None = None, *, timeout_s: float | None = None) -> str:
        """Return the text that a reader of the page sees, or of the first element that matches; at most a million
        characters of it.
        """
        async with self._acting(f"reading {selector or 'the page'}", timeout_s, late=NotFound) as limit_ms:
            text = await self._page.locator(selector or "body").first.inner_text(timeout=limit_ms)
        return text[:_TEXT_LIMIT]

    async def click(self, selector: str, *, timeout_s: float | None = None) -> None:
        """Click the first element that matches, once it can be clicked. A page that this opens becomes the current."""
        async with self._acting(f"clicking {selector}", timeout_s, late=NotFound) as limit_ms:
            self._opened.clear()
            await self._page.locator(selector).first.click(timeout=limit_ms)
            await self._settle(limit_ms)

    async def type(self, selector: str, text: str, *, enter: bool = False, timeout_s: float | None = None) -> None:
        """Put a text into the first field that matches, in place of what is there; press Enter after it if asked."""
        async with self._acting(f"typing into {selector}", timeout_s, late=NotFound) as limit_ms:
            field = self._page.locator(selector).first
            await field.fill(text, timeout=limit_ms)
            if enter:
                await field.press("Enter", timeout=limit_ms)

    async def download(
        self, url: str | None = None, *, click: str | None = None, timeout_s: float | None = None
    ) -> Download:
        """Fetch a file into /workspace/downloads: from an address, or by a click on what matches a selector."""
        if (url is None) == (click is None):
            raise InvalidRequest("a download starts from an address or from a click", hint="give one of the two")
        wanted = (url or click or "")[:200]
        async with self._acting(f"downloading {wanted}", timeout_s) as limit_ms, self._downloads() as arrived:
            if click is not None:
                await self._page.locator(click).first.click(timeout=limit_ms)
            else:
                await self._ask_for_file(url or "", limit_ms)
            async with asyncio.timeout(limit_ms / 1000):
                path = await arrived
        return await self._downloaded(path)

    async def _go(self, url: str, limit_ms: float) -> Response | None:
        from playwright.async_api import Error

        try:
            response = await self._page.goto(url, timeout=limit_ms)
        except Error as error:
            if "net::ERR_" in error.message and "net::ERR_ABORTED" not in error.message:
                # The page that tells of the error comes later: left alone, it would break the next navigation off.
                with suppress(Error):
                    await self._page.wait_for_url("chrome-error://**", wait_until="commit", timeout=_ERROR_PAGE_MS)
            raise
        if response is not None and response.headers.get("x-skep-blocked"):
            raise await self._refusal(response)
        return response

    async def _settle(self, limit_ms: float) -> None:
        """Wait for a page that the last act has opened, if it has: Playwright tells of it later."""
        targets = (await self._session.send("Target.getTargets"))["targetInfos"]
        if sum(target["type"] == "page" for target in targets) > len(self._context.pages):
            async with asyncio.timeout(limit_ms / 1000):
                await self._opened.wait()

    async def _ask_for_file(self, url: str, limit_ms: float) -> None:
        from playwright.async_api import Error

        try:
            await self._go(url, limit_ms)
        except Error as error:
            if "Download is starting" not in error.message and "net::ERR_ABORTED" not in error.message:
                raise
        else:
            raise InvalidRequest(
                f"{url[:200]} is shown as a page, not given as a file", hint="navigate to it and extract its text"
            )

    @asynccontextmanager
    async def _downloads(self) -> AsyncIterator[asyncio.Future[str]]:
        """Let files in for the length of a block; give where the first one is when it has arrived."""
        arrived: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def progress(event: dict[str, Any]) -> None:
            if event.get("state") == "completed" and not arrived.done():
                arrived.set_result(str(event.get("filePath", "")))
            elif event.get("state") == "canceled" and not arrived.done():
                arrived.set_exception(Unavailable("the download broke off", hint="try again"))

        self._session.on("Browser.downloadProgress", progress)
        await _allow_downloads(self._session, allow=True)
        try:
            yield arrived
        finally:
            arrived.cancel()
            self._session.remove_listener("Browser.downloadProgress", progress)
            with suppress(_playwright_error()):
                await _allow_downloads(self._session, allow=False)

    async def _downloaded(self, path: str) -> Download:
        folder, _, name = path.rpartition("/")
        if folder != DOWNLOADS or not name:
            raise Unavailable("the browser put the file somewhere else", hint=f"look into {DOWNLOADS}")
        entry = await self._sandbox.files.stat(path)
        return Download(name, path, entry.size)

    async def _refusal(self, response: Response) -> SkepError:
        message = (await response.text())[:_MESSAGE_LIMIT].strip()
        if response.status == 403:
            return Denied(message, hint="allow the host in the sandbox's network, or use another page")
        return Unavailable(message, hint="try again later, or use another page")

    @asynccontextmanager
    async def _acting(
        self, doing: str, timeout_s: float | None, *, late: Problem = Unavailable
    ) -> AsyncIterator[float]:
        """Give the time that an act has, in milliseconds, and say in Skep's terms what went wrong with it."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            with _explained(doing, limit_s, late):
                yield limit_s * 1000
        except Unavailable as error:
            if not await self._sandbox.alive():
                raise SandboxLost(f"{doing}: the sandbox is gone", hint="create a new sandbox") from error
            ended = self._chromium.ended
            if ended is not None and ended.limit is not None:
                raise LimitReached(
                    f"Chromium ran into the sandbox's limit of {ended.limit}", hint="raise it"
                ) from error
            raise

    def _follow(self, page: Page) -> None:
        self._page = page
        self._opened.set()
        page.on("close", lambda _: self._fall_back(page))

    def _fall_back(self, closed: Page) -> None:
        left = [page for page in self._context.pages if page is not closed]
        if self._page is closed and left:
            self._page = left[-1]


async def _start_driver() -> Playwright:
    try:
        from playwright.async_api import async_playwright
    except ImportError as error:
        raise SandboxUnusable("Playwright is not installed", hint="pip install 'skep[browser]'") from error
    return await async_playwright().start()


async def _stop_driver(starting: asyncio.Future[Playwright]) -> None:
    with suppress(SkepError):  # then there is none, and whoever waited for it was told
        await (await starting).stop()


async def _allow_downloads(session: CDPSession, *, allow: bool) -> None:
    behaviour: dict[str, Any] = {"behavior": "deny"}
    if allow:
        behaviour = {"behavior": "allow", "downloadPath": DOWNLOADS, "eventsEnabled": True}
    await session.send("Browser.setDownloadBehavior", behaviour)


def _playwright_error() -> type[Exception]:
    from playwright.async_api import Error

    return Error


@contextmanager
def _explained(doing: str, limit_s: float, late: Problem) -> Iterator[None]:
    """Turn Playwright's errors into Skep's; `late` is for what was not done in time."""
    from playwright.async_api import Error
    from playwright.async_api import TimeoutError as TooLate

    try:
        yield
    except (TooLate, TimeoutError) as error:
        raise late(
            f"{doing} was not done within {limit_s:g} s",
            hint="look at the page with screenshot or extract_text; allow more time with timeout_s",
        ) from error
    except Error as error:
        reason = re.sub(r"^\w+\.\w+: ", "", error.message.partition("\n")[0])[:300]
        if "selector" in reason.lower() or "Unexpected token" in reason:
            raise InvalidRequest(f"{doing}: {reason}", hint="use a CSS selector, or text=…") from error
        raise Unavailable(f"{doing}: {reason}", hint="check the address, or open the browser anew") from error
