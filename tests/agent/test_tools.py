"""A worker's tools do what they say on a real computer, and say clearly what they cannot do."""

from __future__ import annotations

import asyncio
import urllib.request
from contextlib import suppress
from typing import Any

import pytest
from tests.agent.conftest import Bench, stamp

from skep.agent.actions import UseSkill
from skep.agent.bounds import END_CHARS
from skep.agent.desk import Desk
from skep.agent.observations import (
    Answered,
    CellRan,
    CommandEnded,
    CommandPolled,
    CommandStarted,
    FileEdited,
    FileRead,
    FileWritten,
    Listed,
    PortExposed,
    SkillRan,
    TestsRan,
    Trouble,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SKILL = '---\nname: post\ndescription: Posts.\nmetadata:\n  idempotent: "true"\n  fallback: hive/other\n---\nPost it.\n'
POST = """
import json, os, sys
print("posting", sys.argv[1:], os.environ["TITLE"], os.environ["SKEP_IDEMPOTENCY_KEY"])
print(json.dumps({"status": int(sys.argv[1]), "message": "rich text is not taken"}))
sys.exit(int(sys.argv[2]))
"""


async def test_a_command_goes_on_where_the_last_one_left_off(bench: Bench) -> None:
    await bench.do("run_command", command="mkdir -p deep && cd deep && NAME=bee")
    seen = await bench.do("run_command", command="pwd; echo $NAME; echo oh >&2; exit 3")
    assert isinstance(seen, CommandEnded)
    assert (seen.exit_code, seen.stdout, seen.stderr) == (3, "/workspace/deep\nbee\n", "oh\n")
    await bench.do("run_command", command="cd /workspace")


async def test_each_command_has_an_idempotency_key_of_its_own(bench: Bench) -> None:
    keys = []
    for _ in range(2):
        seen = await bench.do("run_command", command="echo $SKEP_IDEMPOTENCY_KEY; export SKEP_IDEMPOTENCY_KEY=mine")
        assert isinstance(seen, CommandEnded)
        keys.append((seen.stdout.strip(), seen.stamp.key))
    assert all(told == key for told, key in keys) and keys[0] != keys[1]


async def test_code_tests_and_commands_in_the_background_have_one_too(bench: Bench) -> None:
    tell = "echo key $SKEP_IDEMPOTENCY_KEY."
    code = f"import os; os.system('{tell}')"
    seen = [await bench.do("run_python", code=code) for _ in range(2)]
    seen.append(await bench.do("run_tests", command=f"{tell} #"))
    started = await bench.do("run_command", command=tell, background=True)
    assert isinstance(started, CommandStarted)
    polled = await bench.do("poll_command", job=started.job, wait_s=20)
    assert isinstance(polled, CommandPolled)
    told = [(one.stdout, one.stamp.key) for one in seen if isinstance(one, CellRan | TestsRan)]
    told.append((polled.stdout, started.stamp.key))
    assert len(told) == 4 and all(f"key {key}." in text for text, key in told)
    assert len({key for _, key in told}) == 4


async def test_a_command_out_of_time_is_trouble_only_where_nobody_set_the_time(bench: Bench) -> None:
    chosen = await bench.do("run_command", command="echo begun; sleep 60", timeout_s=0.3)
    assert isinstance(chosen, CommandEnded) and chosen.timed_out and chosen.stdout == "begun\n"
    bench.desk.timeouts["run_command"] = 0.3
    usual = await bench.trouble("run_command", command="echo begun; sleep 60")
    assert (usual.failure, usual.stdout) == ("tool_timeout", "begun\n")
    assert bench.desk.double("run_command") == 0.6
    bench.desk.timeouts["run_command"] = 60


async def test_a_long_command_runs_in_the_background_and_is_polled(bench: Bench) -> None:
    await bench.do("run_command", command="mkfifo gate")
    command = "echo one; read x < gate; echo two; exit 4"
    started = await bench.do("run_command", command=command, background=True)
    assert isinstance(started, CommandStarted)
    said = ""
    while "one" not in said:
        seen = await bench.do("poll_command", job=started.job, wait_s=0.05)
        assert isinstance(seen, CommandPolled) and seen.running
        said += seen.stdout
    await bench.do("run_command", command="echo go > gate")
    last = await bench.do("poll_command", job=started.job, wait_s=30)
    assert isinstance(last, CommandPolled)
    assert (last.running, last.exit_code, last.stdout) == (False, 4, "two\n")


async def test_a_background_command_is_stopped_with_all_it_started(bench: Bench) -> None:
    started = await bench.do("run_command", command="sleep 987 & sleep 987", background=True)
    assert isinstance(started, CommandStarted)
    seen = await bench.do("stop_command", job=started.job)
    assert isinstance(seen, CommandPolled) and not seen.running and seen.exit_code == 137
    left = await bench.do("run_command", command="pgrep -f 'sleep 98[7]' || echo none")
    assert isinstance(left, CommandEnded) and left.stdout == "none\n"
    assert "no background job" in (await bench.trouble("stop_command", job="nobody")).message


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("run_command", {"command": "touch begun; sleep 985"}),
        ("run_python", {"code": "import subprocess; open('begun', 'w'); subprocess.run(['sleep', '985'])"}),
    ],
)
async def test_an_act_that_is_cancelled_ends_in_the_sandbox_too(bench: Bench, tool: str, arguments: Any) -> None:
    acting = asyncio.create_task(bench.do(tool, **arguments))
    async with asyncio.timeout(30):
        while isinstance(await bench.do("read_file", path="begun"), Trouble):
            await asyncio.sleep(0.02)
        acting.cancel()
        with suppress(asyncio.CancelledError):
            await acting
        computer = await bench.desk.computer()
        while (await computer.run("pgrep -f 'sleep 98[5]'")).ok:
            await asyncio.sleep(0.02)
    await bench.do("run_command", command="rm begun")


async def test_what_a_cancelled_task_left_running_is_ended_with_it(bench: Bench) -> None:
    desk = Desk(bench.yard.resolve)
    for place in (bench.desk, desk):
        await bench.toolbox.perform(bench.read("run_command", command="exec sleep 986", background=True), place)
    await desk.close(stop=True)
    computer = await bench.desk.computer()
    async with asyncio.timeout(30):
        while (await computer.run("pgrep -fxc 'sleep 98[6]'")).text != "1\n":  # that one is of another task
            await asyncio.sleep(0.02)


async def test_a_long_output_shows_its_ends_and_is_kept_whole_in_a_file(bench: Bench) -> None:
    seen = await bench.do("run_command", command="seq 200000; echo the end")
    assert isinstance(seen, CommandEnded) and seen.truncated and seen.spooled_to
    assert seen.stdout.startswith("1\n2\n") and seen.stdout.endswith("the end\n")
    assert len(seen.stdout) < 2 * END_CHARS + 100
    read = await bench.do("read_file", path=seen.spooled_to, start=123456, lines=2)
    assert isinstance(read, FileRead) and (read.text, read.next) == ("123456\n123457\n", 123458)


async def test_python_returns_values_errors_and_pictures(bench: Bench) -> None:
    picture = "class P:\n  def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n'\nx = 41\nP()"
    seen = await bench.do("run_python", code=picture)
    assert isinstance(seen, CellRan) and seen.outcome == "ok", seen
    async with (await bench.desk.computer()).files() as files:
        assert (await files.read(seen.pictures[0])).startswith(b"\x89PNG")
    seen = await bench.do("run_python", code="print('hi'); x + 1")
    assert isinstance(seen, CellRan) and (seen.stdout, seen.value) == ("hi\n", "42")
    seen = await bench.do("run_python", code="1 / 0")
    assert isinstance(seen, CellRan) and seen.outcome == "error" and "ZeroDivisionError" in seen.error


async def test_a_missing_package_is_named_wherever_it_is_missed(bench: Bench) -> None:
    for tool, arguments in (
        ("run_python", {"code": "import honeycomb_xyz.cells"}),
        ("run_command", {"command": "python3 -c 'import honeycomb_xyz'"}),
    ):
        seen = await bench.trouble(tool, **arguments)
        assert (seen.failure, seen.packages) == ("missing_package", ("honeycomb_xyz",))


async def test_tests_are_run_and_counted(bench: Bench) -> None:
    test = "import unittest\nclass T(unittest.TestCase):\n  def test_a(self): pass\n  def test_b(self): self.fail()\n"
    await bench.do("write_file", path="checks/test_bee.py", content=test)
    seen = await bench.do("run_tests", command="python3 -m unittest", paths=["checks/test_bee.py"])
    assert isinstance(seen, TestsRan)
    assert (seen.exit_code, seen.passed, seen.failed, seen.errors) == (1, 1, 1, 0)


async def test_files_are_written_read_edited_and_listed(bench: Bench) -> None:
    written = await bench.do("write_file", path="notes/a.txt", content="one\ntwo\ntwo\n")
    assert isinstance(written, FileWritten) and (written.path, written.size) == ("/workspace/notes/a.txt", 12)
    await bench.do("write_file", path="notes/a.txt", content="end", append=True)
    twice = await bench.trouble("edit_file", path="notes/a.txt", old="two", new="2")
    assert "occurs 2 times" in twice.message and "all=true" in twice.message
    assert "does not occur" in (await bench.trouble("edit_file", path="notes/a.txt", old="Two", new="2")).message
    edited = await bench.do("edit_file", path="/workspace/notes/a.txt", old="two", new="2", all=True)
    assert isinstance(edited, FileEdited) and edited.replaced == 2
    read = await bench.do("read_file", path="notes/a.txt")
    assert isinstance(read, FileRead) and (read.text, read.next) == ("one\n2\n2\nend", None)
    listed = await bench.do("list_files", path="notes")
    assert isinstance(listed, Listed) and [one.path for one in listed.entries] == ["/workspace/notes/a.txt"]
    assert (await bench.trouble("read_file", path="notes/none")).failure == "tool_refused"


async def test_a_worker_writes_the_scratchpad_of_its_memory_and_nothing_else_of_the_hive(bench: Bench) -> None:
    marks = "<!-- scratchpad -->\n<!-- /scratchpad -->"
    note = marks.replace("\n", "\nbees like rain\n")
    assert isinstance(await bench.do("edit_file", path="hive/MEMORY.md", old=marks, new=note), FileEdited)
    read = await bench.do("read_file", path="hive/MEMORY.md")
    assert isinstance(read, FileRead) and "bees like rain" in read.text
    assert "bees like rain" in (bench.household.folder / "MEMORY.md").read_text()
    for path, new in (("hive/MEMORY.md", "# Mine"), ("hive/.hive.toml", "x"), ("hive/skills/hive/x/SKILL.md", "x")):
        refused = await bench.trouble("write_file", path=path, content=new)
        assert refused.failure == "tool_refused" and "scratchpad" in refused.message
    outside = await bench.trouble("edit_file", path="hive/MEMORY.md", old="# Memory of", new="# Mind of")
    assert "only the scratchpad" in outside.message


async def test_a_port_is_reachable_by_its_link_once_somebody_listens(bench: Bench) -> None:
    assert (await bench.trouble("expose_port", port=8123)).failure == "tool_refused"
    serve = "mkdir -p site && echo honey > site/index.html && cd site && exec python3 -m http.server 8123"
    await bench.do("run_command", command=serve, background=True)
    seen = await bench.do("expose_port", port=8123)
    while isinstance(seen, Trouble):
        seen = await bench.do("expose_port", port=8123)
    assert isinstance(seen, PortExposed)
    again = await bench.do("expose_port", port=8123)
    assert isinstance(again, PortExposed) and again.link == seen.link

    def visit() -> bytes:
        with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(seen.link) as page:
            return bytes(page.read())

    assert await asyncio.to_thread(visit) == b"honey\n"


@pytest.fixture
def skill(bench: Bench) -> str:
    folder = bench.household.skills["hive"] / "post"
    (folder / "scripts").mkdir(parents=True, exist_ok=True)
    (folder / "SKILL.md").write_text(SKILL)
    (folder / "scripts" / "post.py").write_text(POST)
    return "hive/post"


async def test_a_skill_runs_with_its_arguments_and_is_judged_by_what_it_reports(bench: Bench, skill: str) -> None:
    async def post(*arguments: str) -> SkillRan | Trouble:
        title = {"TITLE": "Rain"}
        seen = await bench.do("use_skill", skill=skill, script="post.py", arguments=arguments, environment=title)
        assert isinstance(seen, SkillRan | Trouble)
        return seen

    done = await post("201", "0", "a b")
    assert isinstance(done, SkillRan) and done.status == 201
    assert f"posting ['201', '0', 'a b'] Rain {done.stamp.key}" in done.stdout
    for arguments, failure in (
        (("400", "0"), "tool_refused"),
        (("503", "0"), "tool_error"),
        (("200", "7"), "tool_error"),
        (("204", "0"), "empty_result"),
    ):
        seen = await post(*arguments)
        assert isinstance(seen, Trouble) and seen.failure == failure, arguments
        assert "rich text is not taken" in seen.message and seen.fallback == "hive/other"
    assert "it has: post.py" in (await bench.trouble("use_skill", skill=skill, script="../SKILL.md")).message


async def test_only_a_skill_that_says_so_may_run_twice(bench: Bench, skill: str) -> None:
    action = UseSkill(stamp=stamp(), skill=skill, script="post.py")
    assert bench.toolbox.repeatable(action, bench.desk)
    (bench.household.skills["hive"] / "post" / "SKILL.md").write_text("---\nname: post\n---\n")
    assert not bench.toolbox.repeatable(action, bench.desk)
    assert not bench.toolbox.repeatable(bench.read("run_command", command="true"), bench.desk)
    assert bench.toolbox.repeatable(bench.read("read_file", path="a"), bench.desk)


async def test_without_a_sandbox_its_tools_say_so_and_talking_goes_on(bench: Bench) -> None:
    from skep.errors import SandboxDisabled
    from skep.sessions.computer import Computer
    from skep.sessions.live import Live

    async def check(act: str) -> None: ...
    async def open_room(live: Live, kind: str, name: str) -> bool:
        return False

    async def none() -> Computer:
        return Computer(None, check, open_room, down=SandboxDisabled("it is off", hint="switch it on"))

    async def answer(_: object) -> str:
        return "yes"

    desk = Desk(none, household=bench.household.folder, skills=bench.household.skills, ask=answer)
    calls: dict[str, dict[str, Any]] = {
        "run_command": {"command": "true"},
        "poll_command": {"job": "1"},
        "run_python": {"code": "1"},
        "write_file": {"path": "hive/MEMORY.md", "content": "x"},
        "use_skill": {"skill": "hive/post", "script": "post.py"},
        "browse": {"act": "screenshot"},
        "expose_port": {"port": 80},
    }
    for tool, arguments in calls.items():
        seen = await bench.toolbox.perform(bench.read(tool, **arguments), desk)
        assert isinstance(seen, Trouble) and seen.failure == "sandbox_disabled", tool
    asked = await bench.toolbox.perform(bench.read("ask_user", question="May I?"), desk)
    assert isinstance(asked, Answered) and asked.answer == "yes"


async def test_a_computer_that_was_lost_is_found_again(bench: Bench) -> None:
    await bench.do("write_file", path="kept", content="here")
    await bench.yard.kill()
    assert (await bench.trouble("run_command", command="true")).failure == "sandbox_lost"
    seen = await bench.do("run_command", command="cat kept")
    assert isinstance(seen, CommandEnded) and seen.stdout == "here" and "new one" in seen.note
