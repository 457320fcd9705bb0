"""A worker reads a page of its own sandbox in a window that stays open from one act to the next."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from tests.agent.conftest import Bench

from skep.agent.observations import PageSeen

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = """<!doctype html><title>Garden</title><h1>Bees</h1><p id=empty></p>
<button onclick="document.querySelector('h1').textContent = 'Hornets'">Change</button>"""


@pytest.fixture(autouse=True)
def _chromium() -> None:
    if Path("/usr/lib/chromium/chromium").exists() and importlib.util.find_spec("playwright"):
        return
    missing = "Chromium or Playwright is not installed: apt-get install chromium, pip install 'skep[browser]'"
    pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)


async def test_a_page_is_opened_read_clicked_and_pictured(bench: Bench) -> None:
    await bench.do("write_file", path="page.html", content=PAGE)
    page = await bench.do("browse", act="navigate", url="file:///workspace/page.html")
    assert isinstance(page, PageSeen) and page.title == "Garden"
    await bench.do("browse", act="click", selector="button")
    text = await bench.do("browse", act="extract_text")
    assert isinstance(text, PageSeen) and "Hornets" in text.text
    picture = await bench.do("browse", act="screenshot")
    assert isinstance(picture, PageSeen) and picture.picture
    async with (await bench.desk.computer()).files() as files:
        assert (await files.read(picture.picture)).startswith(b"\x89PNG")
    assert (await bench.trouble("browse", act="extract_text", selector="#empty")).failure == "empty_result"
    assert (await bench.trouble("browse", act="click")).message.startswith("selector is missing")
    bench.desk.timeouts["browse"] = 0.3
    assert (await bench.trouble("browse", act="wait", selector="#never")).failure == "tool_timeout"
    await bench.desk.close()
    seen = await bench.do("run_command", command="pgrep -c chromium")
    assert seen.model_dump()["stdout"].strip() == "0"
