"""JavaScript cells keep their state and give back what they print, return and throw."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator

import pytest

from skep.errors import InvalidRequest
from skep.sandbox.context import Context
from skep.sandbox.interpreter import Interpreter
from skep.sandbox.sandbox import Sandbox


@pytest.fixture
async def node() -> AsyncIterator[Context]:
    if shutil.which("node", path="/usr/local/bin:/usr/bin:/bin") is None:
        message = "node is not installed where a sandbox sees it: apt-get install nodejs"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    async with Sandbox.create() as sandbox, Interpreter(sandbox) as interpreter:
        yield interpreter.context("js", language="javascript")


async def test_declarations_last_and_may_be_repeated(node: Context) -> None:
    await node.run("const n = 6; let m = 7; class Bee {}; function twice(x) { return 2 * x }")
    assert (await node.run("const n = 5; class Bee {}; twice(n * m)")).text == "70"


async def test_output_is_apart_and_the_value_is_text_and_json(node: Context) -> None:
    cell = await node.run("console.log('out'); console.error('err'); ({a: [1, 2]})")
    assert (cell.stdout, cell.stderr) == ("out\n", "err\n")
    assert cell.value is not None
    assert (cell.value.text, cell.value.json) == ("{ a: [ 1, 2 ] }", {"a": [1, 2]})


async def test_await_works_at_the_top_level_and_its_declarations_last(node: Context) -> None:
    await node.run("const os = await import('node:os'); const v = await Promise.resolve(3)")
    assert (await node.run("[v, os.platform()]")).text == "[ 3, 'linux' ]"


async def test_an_error_shows_its_name_message_and_the_frames_of_cells(node: Context) -> None:
    error = (await node.run("function f() { throw new TypeError('bad') }\nf()")).error
    assert error is not None
    assert (error.name, error.message) == ("TypeError", "bad")
    assert "cell 1:2:1" in error.traceback
    assert "javascript_kernel" not in error.traceback


async def test_odd_values_are_shown_and_do_not_end_the_kernel(node: Context) -> None:
    deep = (await node.run("let deep = []; for (let n = 0; n < 500; n++) deep = [deep]; deep")).value
    assert deep is not None
    assert (deep.json, deep.notes) == (None, ("json: left out, it is more than 100 levels deep",))
    half = (await node.run("({s: '\\ud800'})")).value
    assert half is not None
    assert half.json == {"s": "\ufffd"}
    assert (await node.run("const a = {}; a.a = a; a")).value is not None


async def test_objects_can_show_themselves(node: Context) -> None:
    cell = await node.run("display(1); ({[Symbol.for('Jupyter.display')]() { return {'text/html': '<b>x</b>'} }})")
    assert cell.results[0].text == "1"
    assert cell.value is not None
    assert cell.value.html == "<b>x</b>"


@pytest.mark.parametrize("code", ["while (true) {}", "await new Promise(() => {})"])
async def test_an_endless_cell_is_interrupted_and_keeps_its_state(node: Context, code: str) -> None:
    await node.run("var kept = 1")
    cell = await node.run(code, timeout_s=0.3)
    assert (cell.outcome, cell.state_lost) == ("timeout", False)
    assert (await node.run("kept")).text == "1"


async def test_a_process_that_exits_says_that_the_state_is_gone(node: Context) -> None:
    cell = await node.run("var x = 1; process.exit(4)")
    assert (cell.outcome, cell.state_lost, cell.exit and cell.exit.code) == ("died", True, 4)
    fresh = await node.run("typeof x")
    assert (fresh.text, fresh.restarted) == ("'undefined'", True)


async def test_without_node_the_error_says_what_is_missing() -> None:
    async with Sandbox.create(env={"PATH": "/nowhere"}) as sandbox, Interpreter(sandbox) as interpreter:
        with pytest.raises(InvalidRequest, match="needs node"):
            await interpreter.run("1", context="js", language="javascript")
