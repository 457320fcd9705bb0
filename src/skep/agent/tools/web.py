"""The browser, for hives that have that role."""

from __future__ import annotations

from skep.agent.actions import Browse
from skep.agent.bounds import clip, spool
from skep.agent.desk import Desk
from skep.agent.observations import Observation, PageSeen
from skep.agent.tool import Tool
from skep.agent.tools.printed import trouble
from skep.errors import InvalidRequest, SkepError
from skep.sandbox.browser import Browser

_PICTURES = "/workspace/output/display"


async def browse(action: Browse, desk: Desk) -> Observation:
    window = await desk.window()
    try:
        return await _act(action, window.browser, desk)
    except SkepError as error:
        if action.timeout_s is None and type(error.__cause__).__name__ == "TimeoutError":
            return trouble(action, "tool_timeout", error.message)
        raise


async def _act(action: Browse, browser: Browser, desk: Desk) -> Observation:
    limit_s = action.timeout_s or desk.timeout_s(action.kind)
    match action.act:
        case "navigate":
            page = await browser.navigate(_given(action.url, "url"), timeout_s=limit_s)
            return PageSeen(stamp=action.stamp, url=page.url, title=clip(page.title, 300), status=page.status)
        case "wait":
            await browser.wait(action.selector or None, timeout_s=limit_s)
        case "click":
            await browser.click(_given(action.selector, "selector"), timeout_s=limit_s)
        case "type":
            await browser.type(_given(action.selector, "selector"), action.text, timeout_s=limit_s)
        case "extract_text":
            return await _text(action, browser, desk, limit_s)
        case "screenshot":
            path = f"{_PICTURES}/{action.stamp.call}.png"
            await browser.screenshot(path, timeout_s=limit_s)
            return PageSeen(stamp=action.stamp, url=browser.url, picture=path)
    return PageSeen(stamp=action.stamp, url=browser.url)


async def _text(action: Browse, browser: Browser, desk: Desk, limit_s: float) -> Observation:
    text = await browser.extract_text(action.selector or None, timeout_s=limit_s)
    if not text.strip():
        return trouble(action, "empty_result", "there is no text to be seen; wait for it, or take a screenshot")
    shown = clip(text)
    path = None if shown == text else await spool(await desk.computer(), action.stamp.call, text)
    return PageSeen(stamp=action.stamp, url=browser.url, text=shown, truncated=shown != text, spooled_to=path)


def _given(value: str, name: str) -> str:
    if not value:
        raise InvalidRequest(f"{name} is missing", hint=f"say which {name}")
    return value


TOOLS = (Tool(Browse, browse, network=True),)
