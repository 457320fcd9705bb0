"""Cells keep their state, give back what they print, show and raise, and end as documented whatever they do."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest
from tests.beside import Ran

from skep.errors import Conflict, InvalidRequest, NotFound, SandboxLost
from skep.sandbox.interpreter import Interpreter
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.pool import InterpreterPool
from skep.sandbox.results import Cell, Printed, Result
from skep.sandbox.sandbox import Sandbox
from skep.testing.promise import running


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox.create(limits=Limits(output_bytes=MIB)) as made:
        yield made


@pytest.fixture
async def interpreter(sandbox: Sandbox) -> AsyncIterator[Interpreter]:
    async with Interpreter(sandbox) as made:
        yield made


@pytest.fixture(scope="session")
def science(found_beside: Callable[[str], Ran]) -> str:
    """An environment on this machine with numpy, pandas and matplotlib."""
    made = found_beside("tests.science_environment")
    if made.returncode != 0:
        message = f"numpy, pandas and matplotlib cannot be had: {made.stderr.strip()[-500:]}"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return made.stdout.strip()


@pytest.fixture
async def scientist(science: str) -> AsyncIterator[Interpreter]:
    async with (
        Sandbox.create(read_only={science: "/opt/env"}) as sandbox,
        Interpreter(sandbox, python="/opt/env/bin/python") as interpreter,
    ):
        yield interpreter


def only(cell: Cell) -> Result:
    assert cell.error is None, cell.error.traceback
    (result,) = cell.results
    return result


async def test_variables_functions_and_imports_last_from_cell_to_cell(interpreter: Interpreter) -> None:
    await interpreter.run("import math\ndef area(r):\n    return math.pi * r * r\nr = 2")
    assert (await interpreter.run("round(area(r), 3)")).text == "12.566"


async def test_stdout_and_stderr_stay_apart_and_the_last_expression_is_the_value(interpreter: Interpreter) -> None:
    cell = await interpreter.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n40 + 2")
    assert (cell.stdout, cell.stderr, cell.text, cell.ok) == ("out\n", "err\n", "42", True)


@pytest.mark.parametrize("code", ["x = 1", "None", "6 * 7;", "def f(): pass", "", "# nothing"])
async def test_a_cell_without_a_value_shows_none(interpreter: Interpreter, code: str) -> None:
    cell = await interpreter.run(code)
    assert (cell.outcome, cell.results) == ("ok", ())


async def test_await_works_at_the_top_level(interpreter: Interpreter) -> None:
    await interpreter.run("import asyncio\nbox = asyncio.Queue()\nawait box.put(7)")
    assert (await interpreter.run("await box.get()")).text == "7"


async def test_an_error_has_a_name_a_message_and_a_traceback_of_the_users_frames(interpreter: Interpreter) -> None:
    await interpreter.run("import json\ndef read(text):\n    return json.loads(text)")
    error = (await interpreter.run("read('{')")).error
    assert error is not None
    assert error.name == "JSONDecodeError"
    assert error.message.startswith("Expecting property name")
    assert 'File "<cell 1>", line 3, in read\n    return json.loads(text)' in error.traceback
    assert 'File "<cell 2>", line 1, in <module>' in error.traceback
    assert "python_kernel" not in error.traceback
    assert error.traceback.count("json/") == 1, "of the library only the frame that raised"


async def test_a_syntax_error_shows_the_line_and_nothing_else(interpreter: Interpreter) -> None:
    error = (await interpreter.run("x = 1\ny = = 2")).error
    assert error is not None
    assert error.name == "SyntaxError"
    assert "y = = 2" in error.traceback
    assert error.traceback.count("File ") == 1


async def test_leaving_python_is_an_error_of_the_cell_and_keeps_the_state(interpreter: Interpreter) -> None:
    await interpreter.run("x = 1")
    left = await interpreter.run("import sys\nsys.exit(3)")
    assert (left.outcome, left.error and left.error.name, left.state_lost) == ("error", "SystemExit", False)
    assert (await interpreter.run("x")).text == "1"


async def test_asking_for_input_is_refused_with_a_reason(interpreter: Interpreter) -> None:
    cell = await interpreter.run("input('name? ')")
    assert cell.error is not None
    assert "nobody to ask" in cell.error.message
    assert (await interpreter.run("import sys\nsys.stdin.read()")).text == "''"


async def test_a_value_is_shown_in_every_format_it_offers(interpreter: Interpreter) -> None:
    cell = await interpreter.run(
        "class All:\n"
        "    def __repr__(self): return 'plain'\n"
        "    def _repr_html_(self): return '<b>h</b>'\n"
        "    def _repr_markdown_(self): return '*m*'\n"
        "    def _repr_svg_(self): return '<svg/>'\n"
        "    def _repr_json_(self): return {'a': [1]}\n"
        "    def _repr_latex_(self): return '$x$'\n"
        "    def _repr_jpeg_(self): return b'\\xff\\xd8'\n"
        "All()"
    )
    result = only(cell)
    assert (result.text, result.html, result.markdown, result.svg) == ("plain", "<b>h</b>", "*m*", "<svg/>")
    assert (result.json, result.latex, result.jpeg, result.main) == ({"a": [1]}, "$x$", b"\xff\xd8", True)


async def test_display_shows_values_as_they_come_and_bundles_of_media_types(interpreter: Interpreter) -> None:
    cell = await interpreter.run("display(1, 'two')\ndisplay({'text/html': '<i>x</i>'}, raw=True)\n3")
    assert [result.text for result in cell.results] == ["1", "'two'", "", "3"]
    assert cell.results[2].html == "<i>x</i>"
    assert [result.main for result in cell.results] == [False, False, False, True]


async def test_a_format_that_fails_is_noted_and_the_value_still_shown(interpreter: Interpreter) -> None:
    cell = await interpreter.run("class Bad:\n    def _repr_html_(self): raise ValueError('no')\nBad()")
    assert only(cell).notes == ("_repr_html_ failed: ValueError: no",)
    assert only(cell).text.startswith("<__main__.Bad object")


async def test_a_value_that_is_too_long_is_cut_and_says_so(interpreter: Interpreter) -> None:
    result = only(await interpreter.run("'x' * 3_000_000"))
    assert len(result.text) == 256 << 10
    assert result.notes == ("text: the first 262,144 of 3,000,002 characters",)


async def test_odd_values_are_shown_and_do_not_end_the_kernel(interpreter: Interpreter) -> None:
    await interpreter.run("kept = 1")
    assert only(await interpreter.run("display({'text/html': 'a\\ud800b'}, raw=True)")).html == "a?b"
    deep = only(await interpreter.run("deep = []\nfor _ in range(500): deep = [deep]\ndeep"))
    assert (deep.json, deep.notes) == (None, ("json: left out, it is more than 100 levels deep",))
    assert only(await interpreter.run("float('nan'), [float('inf')]")).text == "(nan, [inf])"
    assert only(await interpreter.run("[float('inf'), {1, 2}]")).json is None
    assert (await interpreter.run("raise ValueError('\\ud800')")).error is not None
    assert (await interpreter.run("kept")).text == "1"


async def test_programs_with_processes_of_their_own_work(interpreter: Interpreter) -> None:
    code = (
        "import multiprocessing\ndef square(n): return n * n\n"
        "with multiprocessing.Pool(2) as pool: out = pool.map(square, range(4))\nout"
    )
    assert (await interpreter.run(code)).text == "[0, 1, 4, 9]"


async def test_shell_lines_run_and_can_be_kept(interpreter: Interpreter) -> None:
    await interpreter.run("name = 'bee'")
    cell = await interpreter.run(
        "!echo {name} '{print $1}'\nlines = !printf 'a\\nb\\n'\nif True:\n    !echo indented\nlines"
    )
    assert cell.stdout == "bee {print $1}\nindented\n"
    assert cell.text == "['a', 'b']"


async def test_a_mark_inside_a_string_is_no_magic(interpreter: Interpreter) -> None:
    cell = await interpreter.run("text = '''\n!echo no\n%pip nothing\n'''\n!echo yes\nlen(text.split())")
    assert (cell.stdout, cell.text) == ("yes\n", "4")


async def test_cells_of_bash_and_files_are_magics(interpreter: Interpreter) -> None:
    written = await interpreter.run("%%writefile hello.py\nGREETING = 'hi'\n")
    assert written.stdout == "wrote hello.py\n"
    assert (await interpreter.run("import hello\nhello.GREETING")).text == "'hi'"
    failed = await interpreter.run("%%bash\necho out\nexit 3")
    assert (failed.stdout, failed.error and failed.error.message) == ("out\n", "bash ended with code 3")


async def test_folder_environment_and_time_have_magics(interpreter: Interpreter) -> None:
    cell = await interpreter.run("%cd /tmp\n%env BEES=many\n%matplotlib inline\n%time n = 6 * 7\n!pwd; echo $BEES\nn")
    assert cell.text == "42"
    assert cell.stdout.endswith("/tmp\nmany\n")
    assert "Wall time" in cell.stdout


async def test_an_unknown_magic_is_an_error_that_names_those_there_are(interpreter: Interpreter) -> None:
    for code in ("%rocket 1", "%%rocket\nx"):
        error = (await interpreter.run(code)).error
        assert error is not None
        assert error.name == "UnknownMagic"
        assert "pip" in error.message or "bash" in error.message


async def test_pip_without_network_fails_with_its_own_message(interpreter: Interpreter) -> None:
    cell = await interpreter.run("%env PIP_RETRIES=0\n%pip install --no-index no-such-package")
    assert cell.outcome == "error"
    assert "no-such-package" in cell.stderr or "no pip" in (cell.error.message if cell.error else "")


async def test_a_file_of_the_workspace_cannot_stand_in_for_the_kernels_modules(sandbox: Sandbox) -> None:
    for name in ("json", "traceback", "subprocess", "base64"):
        await sandbox.files.write(f"{name}.py", "raise SystemExit('planted')")
    async with Interpreter(sandbox) as interpreter:
        cell = await interpreter.run("!echo well\n1 / 0")
    assert (cell.stdout, cell.error and cell.error.name) == ("well\n", "ZeroDivisionError")


async def test_a_gigabyte_of_prints_is_carried_and_not_kept(interpreter: Interpreter) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cell = await interpreter.run("line = 'x' * 1023\nfor _ in range(1 << 20): print(line)\n'end'", timeout_s=100)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert (cell.outcome, cell.text, cell.truncated, len(cell.stdout)) == ("ok", "'end'", True, MIB)
    assert grown < 64 * MIB


async def test_a_cell_that_never_ends_is_interrupted_and_keeps_its_variables(interpreter: Interpreter) -> None:
    cell = await interpreter.run("kept = 5\nwhile True: kept += 0", timeout_s=0.3)
    assert (cell.outcome, cell.error and cell.error.name, cell.state_lost) == ("timeout", "KeyboardInterrupt", False)
    assert "interrupted" in cell.note
    assert (await interpreter.run("kept")).text == "5"


async def test_a_cell_that_ignores_the_interrupt_is_killed_and_the_state_said_to_be_gone(
    interpreter: Interpreter,
) -> None:
    await interpreter.run("x = 1")
    cell = await interpreter.run(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: x", timeout_s=0.2
    )
    assert (cell.outcome, cell.state_lost, cell.exit and cell.exit.signal) == ("timeout", True, 9)
    assert "variables" in cell.note
    fresh = await interpreter.run("'x' in globals()")
    assert (fresh.text, fresh.restarted) == ("False", True)
    assert not (await interpreter.run("1")).restarted, "it is said once"


@pytest.mark.parametrize("death", ["os._exit(7)", "os.kill(os.getpid(), 9)", "os.closerange(3, 100)"])
async def test_a_cell_that_kills_its_kernel_says_so_and_the_next_starts_fresh(
    interpreter: Interpreter, death: str
) -> None:
    cell = await interpreter.run(f"import os\nx = 1\nprint('last words', flush=True)\n{death}")
    assert (cell.outcome, cell.state_lost, cell.stdout) == ("died", True, "last words\n")
    assert cell.error is not None
    assert cell.error.name == "KernelDied"
    fresh = await interpreter.run("x")
    assert (fresh.error and fresh.error.name, fresh.restarted) == ("NameError", True)


async def test_a_kernel_out_of_memory_names_the_limit() -> None:
    limits = Limits(memory_bytes=256 * MIB)
    async with Sandbox.create(limits=limits) as sandbox, Interpreter(sandbox) as interpreter:
        cell = await interpreter.run("hog = []\nwhile True: hog.append(bytearray(8 << 20))")
        assert (cell.outcome, cell.state_lost) == ("died", True)
        assert cell.exit is not None
        assert cell.exit.limit == "memory"
        assert (await interpreter.run("'again'")).text == "'again'"


async def test_a_kernel_that_dies_between_cells_is_replaced_and_the_loss_said(interpreter: Interpreter) -> None:
    await interpreter.run("import os, threading\nthreading.Timer(0.05, os._exit, [0]).start()\nx = 1")
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        while not (cell := await interpreter.run("'x' in globals()")).restarted:
            assert cell.outcome in ("ok", "died")
            if cell.outcome == "died":
                continue
    assert cell.text == "False"


async def test_forged_messages_end_the_kernel_and_nothing_else(interpreter: Interpreter) -> None:
    for forged in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x05" + b"[" * 5, b"\x00\x00\x00\x04null"):
        cell = await interpreter.run(
            "import os, time\n"
            "for fd in range(3, 50):\n"
            "    try:\n"
            "        if os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'): "
            f"os.write(fd, {forged!r})\n"
            "    except OSError: pass\n"
            "time.sleep(30)"
        )
        assert (cell.outcome, cell.state_lost) == ("died", True)
    assert (await interpreter.run("1 + 1")).text == "2"


async def test_a_child_of_a_cell_cannot_answer_for_it(interpreter: Interpreter) -> None:
    cell = await interpreter.run(
        "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('child' if not pid else 'parent')\npid > 0"
    )
    assert (cell.text, sorted(cell.stdout.split())) == ("True", ["child", "parent"])


async def test_an_interrupt_from_outside_breaks_into_the_cell_and_its_programs(interpreter: Interpreter) -> None:
    context = interpreter.context()
    started = asyncio.Event()
    running = asyncio.create_task(context.run("x = 3\nprint('in')\n!sleep 60", on_stdout=lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 20)
    await context.interrupt()
    cell = await asyncio.wait_for(running, 20)
    assert (cell.outcome, cell.error and cell.error.name) == ("interrupted", "KeyboardInterrupt")
    assert (await context.run("x")).text == "3"


async def test_an_interrupt_between_cells_does_nothing(interpreter: Interpreter) -> None:
    context = interpreter.context()
    await context.run("x = 1")
    await context.interrupt()
    assert (await context.run("x")).text == "1"


async def test_a_cancelled_cell_is_interrupted_and_the_context_goes_on(interpreter: Interpreter) -> None:
    context = interpreter.context()
    started = asyncio.Event()
    code = "x = 4\nprint('in')\nwhile True: x"
    running = asyncio.create_task(context.run(code, on_stdout=lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    cell = await context.run("x")
    assert (cell.text, cell.stdout) == ("4", "")


@pytest.mark.parametrize("stubborn", [True, False])
async def test_a_cancelled_cell_that_does_not_stop_can_be_given_up(interpreter: Interpreter, stubborn: bool) -> None:
    context = interpreter.context()
    pid = int((await context.run("import os, time\nos.getpid()")).text)
    loop = "while True:\n  try: time.sleep(100)\n  except KeyboardInterrupt: pass" if stubborn else "while True: pass"
    started = asyncio.Event()
    cell = asyncio.create_task(context.run(f"print('in')\n{loop}", on_stdout=lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 20)
    cell.cancel()
    await asyncio.wait([cell])
    assert await running(interpreter.sandbox, pid)
    await context.give_up(within_s=0.5 if stubborn else 20)
    assert await running(interpreter.sandbox, pid) == (not stubborn)
    assert (await context.run("1")).restarted == stubborn


async def test_an_interrupt_that_comes_too_late_does_not_meet_the_next_cell(interpreter: Interpreter) -> None:
    """The time is up in the moment in which the cell ends, again and again."""
    await interpreter.run("import time\nkept = 1")
    for number in range(60):
        await interpreter.run("time.sleep(0.004)", timeout_s=0.0035 + number * 0.00005)
        cell = await interpreter.run("for _ in range(2000): kept\nkept")
        assert (cell.outcome, cell.text, cell.restarted) == ("ok", "1", False)


async def test_cells_cancelled_at_any_moment_leave_the_context_whole(interpreter: Interpreter) -> None:
    context = interpreter.context()
    await context.run("import time\nkept = 1")
    for number in range(60):
        running = asyncio.create_task(context.run("time.sleep(0.002)\nprint('x')\ndisplay(1)"))
        await asyncio.sleep(number * 0.0001)
        running.cancel()
        await asyncio.wait([running])
    cell = await context.run("kept")
    assert (cell.text, cell.restarted, cell.stdout) == ("1", False, "")


async def test_a_cell_cancelled_before_it_began_does_not_cost_the_variables(interpreter: Interpreter) -> None:
    context = interpreter.context()
    await context.run("kept = 1")
    for number in range(12):
        running = asyncio.create_task(context.run("while True: kept"))
        await asyncio.sleep(number * 0.0001)
        running.cancel()
        await asyncio.wait([running])
        cell = await context.run("kept")
        assert (cell.text, cell.restarted) == ("1", False)


async def test_a_restart_forgets_everything_and_is_said_once(interpreter: Interpreter) -> None:
    context = interpreter.context()
    await context.run("x = 1")
    await context.restart()
    cell = await context.run("'x' in globals()")
    assert (cell.text, cell.restarted, (await context.run("1")).restarted) == ("False", True, False)


async def test_output_streams_while_the_cell_runs(interpreter: Interpreter) -> None:
    context = interpreter.context()
    code = (
        "import os, time\nprint('first')\nwhile not os.path.exists('go'): time.sleep(0.01)\ndisplay(2)\nprint('last')"
    )
    seen: list[object] = []
    async with aclosing(context.stream(code)) as events:
        async for event in events:
            seen.append(event)
            if event == Printed("stdout", "first\n"):
                await interpreter.sandbox.files.write("go", "")
    assert isinstance(seen[-1], Cell)
    assert seen[-1].stdout == "first\nlast\n"
    assert [event.text for event in seen if isinstance(event, Result)] == ["2"]


async def test_what_was_printed_before_a_result_comes_before_it(interpreter: Interpreter) -> None:
    seen: list[str] = []
    code = "for n in range(50):\n    print(f'printed {n}.')\n    display(n)"
    await interpreter.context().run(code, on_stdout=seen.append, on_result=lambda result: seen.append(result.text))
    for number in range(50):
        assert f"printed {number}.\n" in "".join(seen[: seen.index(str(number))])


async def test_leaving_a_stream_early_interrupts_the_cell(interpreter: Interpreter) -> None:
    context = interpreter.context()
    async with aclosing(context.stream("x = 1\nwhile True: print('more')")) as events:
        async for _ in events:
            break
    assert (await context.run("x")).text == "1"


async def test_a_slow_reader_holds_the_cell_up_and_loses_nothing(interpreter: Interpreter) -> None:
    context = interpreter.context()
    size = 0
    async with aclosing(context.stream("for _ in range(20): print('y' * (1 << 20))")) as events:
        async for event in events:
            await asyncio.sleep(0.005)
            size += len(event.text) if isinstance(event, Printed) else 0
    assert size == 20 * ((1 << 20) + 1)


async def test_contexts_are_apart_run_at_once_and_can_be_listed_and_closed(interpreter: Interpreter) -> None:
    one, two = interpreter.context("one"), interpreter.context("two")
    await one.run("x = 1")
    meeting = "import os, time\nopen({mine!r}, 'w')\nwhile not os.path.exists({theirs!r}): time.sleep(0.01)\n'met'"
    met = await asyncio.gather(
        one.run(meeting.format(mine="a", theirs="b")), two.run(meeting.format(mine="b", theirs="a"))
    )
    assert [cell.text for cell in met] == ["'met'", "'met'"]
    assert (await two.run("x")).error is not None
    assert [(context.name, context.cells) for context in interpreter.contexts()] == [("one", 2), ("two", 2)]
    await interpreter.close_context("one")
    assert [context.name for context in interpreter.contexts()] == ["two"]
    with pytest.raises(InvalidRequest, match="closed"):
        await one.run("1")


async def test_contexts_are_named_sensibly_and_keep_their_language(interpreter: Interpreter) -> None:
    interpreter.context("a")
    with pytest.raises(Conflict, match="runs python"):
        interpreter.context("a", language="bash")
    with pytest.raises(InvalidRequest, match="cannot name"):
        interpreter.context("../a")
    with pytest.raises(NotFound):
        await interpreter.close_context("nothing")


async def test_a_lost_sandbox_ends_the_cell_with_an_error(sandbox: Sandbox, interpreter: Interpreter) -> None:
    started = asyncio.Event()
    code = "print('in')\nimport time\ntime.sleep(60)"
    running = asyncio.create_task(interpreter.context().run(code, on_stdout=lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 20)
    await sandbox.stop()
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(running, 10)


async def test_an_interpreter_that_is_not_there_is_a_clear_error(sandbox: Sandbox) -> None:
    async with Interpreter(sandbox, python="/usr/bin/no-python") as interpreter:
        with pytest.raises(InvalidRequest, match="no-python"):
            await interpreter.run("1")
    async with Interpreter(sandbox, python="/bin/false") as interpreter:
        with pytest.raises(InvalidRequest, match="did not start"):
            await interpreter.run("1")


async def test_the_workspaces_own_environment_is_used(sandbox: Sandbox) -> None:
    made = await sandbox.run("/usr/bin/python3 -m venv --without-pip /workspace/.venv")
    assert made.ok, made.error_text
    async with Interpreter(sandbox) as interpreter:
        assert (await interpreter.run("import sys\nsys.prefix")).text == "'/workspace/.venv'"


async def test_bash_cells_keep_folder_and_variables_and_report_their_code(interpreter: Interpreter) -> None:
    shell = interpreter.context("sh", language="bash")
    await shell.run("cd /tmp; BEES=many")
    cell = await shell.run("pwd; echo $BEES; echo oops >&2; exit 4")
    assert (cell.stdout, cell.stderr, cell.outcome) == ("/tmp\nmany\n", "oops\n", "error")
    assert (cell.error and cell.error.message) == "the command ended with code 4"
    endless = await shell.run("sleep 60", timeout_s=0.2)
    assert (endless.outcome, endless.state_lost) == ("timeout", False)
    assert (await shell.run("echo $BEES")).stdout == "many\n"
    await shell.restart()
    cell = await shell.run("echo [$BEES]")
    assert (cell.stdout, cell.restarted) == ("[]\n", True)


async def test_a_frame_comes_back_as_records_within_bounds(scientist: Interpreter) -> None:
    cell = await scientist.run(
        "import numpy as np, pandas as pd\n"
        "pd.DataFrame({'n': range(5000), 'x': [1.5, np.nan] * 2500,"
        " 't': pd.Timestamp('2026-01-02'), 's': ['a', None] * 2500})"
    )
    result = only(cell)
    assert result.data is not None
    assert [column.name for column in result.data.columns] == ["n", "x", "t", "s"]
    assert result.data.records[1] == {"n": 1, "x": None, "t": "2026-01-02T00:00:00", "s": None}
    assert (len(result.data.rows), result.data.total_rows) == (1000, 5000)
    assert "data: the first 1,000 of 5,000 rows" in result.notes
    assert result.html is not None
    grouped = only(await scientist.run("pd.Series([1, 2], index=pd.Index(['p', 'q'], name='k'), name='v')"))
    assert grouped.data is not None
    assert grouped.data.records == [{"k": "p", "v": 1}, {"k": "q", "v": 2}]


async def test_plots_come_back_as_pictures_with_their_data(scientist: Interpreter) -> None:
    cell = await scientist.run(
        "import matplotlib.pyplot as plt\n"
        "fig, (a, b, c, d, e) = plt.subplots(1, 5)\n"
        "a.plot([1, 2], [3, 4], label='up'); a.set_xlabel('Time (s)'); a.set_title('Growth')\n"
        "b.bar(['x', 'y'], [5, 6])\n"
        "c.scatter([1], [2])\n"
        "d.pie([1, 3], labels=['p', 'q'])\n"
        "e.boxplot([[1, 2, 3, 4, 100]])\n"
        "plt.show()\n"
        "plt.plot([9, 8])\n"
        "None",
        timeout_s=100,
    )
    assert cell.outcome == "ok", cell.error
    assert cell.stderr == ""
    first, second = cell.results
    assert first.png is not None
    assert second.png is not None
    assert first.png[:8] == b"\x89PNG\r\n\x1a\n"
    line, bars, dots, pie, box = first.charts
    assert (line.kind, line.title, line.x_label, line.x_unit) == ("line", "Growth", "Time (s)", "s")
    assert (line.series[0].label, line.series[0].points) == ("up", ((1, 3), (2, 4)))
    assert (bars.kind, bars.series[0].points) == ("bar", (("x", 5.0), ("y", 6.0)))
    assert (dots.kind, dots.series[0].points) == ("scatter", ((1.0, 2.0),))
    assert (pie.kind, pie.series[0].points) == ("pie", (("p", 0.25), ("q", 0.75)))
    assert (box.kind, box.series[0].box and box.series[0].box.median) == ("box", 3.0)
    assert (await scientist.run("plt.get_fignums()")).text == "[]", "published figures are closed"


async def test_a_pool_hands_out_kernels_with_their_imports_done(science: str) -> None:
    async def make() -> Sandbox:
        return await Sandbox.create(read_only={science: "/opt/env"})

    async with InterpreterPool(make, python="/opt/env/bin/python") as pool:
        assert pool.ready == 1
        async with await pool.take() as interpreter:
            cell = await interpreter.run("import sys\n'pandas' in sys.modules")
            assert (cell.text, cell.restarted) == ("True", False)
        assert not await interpreter.sandbox.alive()
        async with await pool.take() as another:
            assert another.sandbox.id != interpreter.sandbox.id


async def test_a_pool_replaces_what_died_while_it_waited() -> None:
    made: list[Sandbox] = []

    async def make() -> Sandbox:
        made.append(await Sandbox.create())
        return made[-1]

    async with InterpreterPool(make, preload=()) as pool:
        await made[0].stop()
        async with await pool.take() as interpreter:
            assert interpreter.sandbox is not made[0]
            assert (await interpreter.run("1 + 1")).text == "2"
