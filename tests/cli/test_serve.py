"""A home has one server; its commands go through it while it runs, and do without when it does not."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.typing import CTRL_C, at_terminal
from tests.gateway.served import DEADLINE_S, Home, Served, environment, eventually, furnish, runs, serving

from skep.app.service import is_public
from skep.cli.desk import actor


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, warm_scripts: Path) -> Iterator[Served]:
    with serving(furnish(tmp_path_factory.mktemp("served"), warm_scripts)) as server:
        yield server


def test_a_task_outlives_the_command_that_asked_for_it(served: Served) -> None:
    home = served.home
    task = json.loads(home.done("run", "count on", "--no-follow", "--json"))["id"]
    assert home.done("task", "follow", task) == "three lines"
    shown = json.loads(home.done("task", "show", task, "--json"))
    assert (shown["status"], shown["scripted"]) == ("succeeded", True)
    assert home.done("task", "fork", task, "--step", str(shown["steps"][-1]["number"])) == "three lines"
    events = map(json.loads, home.done("events", "list", "garden", "--json").splitlines())
    assert {one["actor"] for one in events if one["type"] in ("prompted", "task_forked")} == {actor()}


def test_what_a_command_leaves_running_outlives_it(served: Served) -> None:
    inside = ("exec", "--hive", "garden", "--", "sh", "-c")
    pid = served.home.done(*inside, "sleep 300 > /dev/null 2>&1 & echo $!")
    cell = ("python", "--hive", "garden", "--context", "bees", "-c")
    served.home.done(*cell, f"import os; os.kill({pid}, 0)")  # a context is kept in the same computer
    assert served.home.done(*inside, f"cat /proc/{pid}/comm; kill {pid}") == "sleep"
    served.home.done("python", "--hive", "garden", "--context", "bees", "--end")


def test_a_shell_begins_where_the_last_one_was_left(served: Served) -> None:
    shell = ("shell", "--hive", "garden")
    with at_terminal(served.home, *shell) as terminal:
        terminal.shows("skep")
        terminal.type(b"cd /tmp; x=5; twice() { echo $(($1 * 2)); }; PS1='> '\nexit\n")
        assert terminal.process.wait(DEADLINE_S) == 0
    with at_terminal(served.home, *shell) as terminal:
        terminal.shows("skep")
        terminal.type(b"echo at $PWD with $(twice $x)\nx=7; echo seven$x\n")
        terminal.shows("at /tmp with 10")
        terminal.shows("seven7")
        terminal.type(b"kill -HUP $$\n")  # what it gets when its window is closed
        assert terminal.process.wait(DEADLINE_S) == 129
    with at_terminal(served.home, *shell, "--cwd", "/workspace") as terminal:
        terminal.shows("skep")
        terminal.type(b"echo at $PWD with $(twice $x)\nexit 3\n")
        terminal.shows("at /workspace with 14")
        assert terminal.process.wait(DEADLINE_S) == 3


def test_a_prompt_undoes_what_the_last_one_did_even_where_another_process_holds_the_sandbox(served: Served) -> None:
    home, acme = served.home, ("--account", "acme")
    mine = (*acme, "--hive", "meadow")
    home.done("hive", "set", "meadow", "same_thread=rollback", *acme)
    command = [str(home.skep), "exec", *mine, "--ticket", "spring", "--", "sh", "-c", "echo sown > bed; echo up; cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(home.folder), stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        first = json.loads(home.done("run", "nap a while", *mine, "--no-follow", "--json"))["id"]
        eventually(lambda: runs("sleep", "30.125"), "the first task is in the middle of an act")
        assert home.done("run", "count instead", *mine) == "three lines"
        holder.kill()
    assert json.loads(home.done("task", "show", first, *acme, "--json"))["status"] == "cancelled"
    assert home.done("exec", *mine, "--", "sh", "-c", "cat bed counted; test -e naps; echo $?") == "sown\nthree1"


def test_a_second_server_of_a_home_is_refused(served: Served) -> None:
    ran = served.home.run("serve", "--port", "0")
    assert ran.returncode == 2
    assert f"runs already at {served.address}" in ran.stderr


def test_a_server_of_another_version_is_named_and_what_to_do_about_it(served: Served) -> None:
    record = served.home.state / "run/server.json"
    kept = record.read_text()
    record.write_text(json.dumps({**json.loads(kept), "version": "0.0.1"}))
    try:
        ran = served.home.run("task", "list")
        assert (ran.returncode, "is Skep 0.0.1" in ran.stderr, f"kill {served.process.pid}" in ran.stderr) == (
            2,
            True,
            True,
        )
        assert served.home.done("exec", "--hive", "garden", "--", "echo", "fine") == "fine"
    finally:
        record.write_text(kept)


def test_tasks_of_the_server_are_handled_by_the_same_commands(served: Served) -> None:
    task = json.loads(served.home.done("run", "sleep 300.125", "--no-follow", "--json"))["id"]
    assert task in served.home.done("task", "list", "--hive", "garden")
    cancelled = served.home.run("task", "cancel", task, "--why", "enough")
    assert cancelled.returncode == 0, cancelled.stderr
    followed = served.home.run("task", "follow", task)
    assert followed.returncode == 1
    assert "cancelled" in followed.stderr
    again = json.loads(served.home.done("task", "retry", task, "--no-follow", "--json"))
    assert again["origin"] == task
    served.home.done("task", "cancel", again["id"])
    assert "no task" in served.home.run("task", "answer", "tsk_x", "yes").stderr


def test_who_leaves_while_the_server_does_not_answer_is_told_that_the_task_may_go_on(served: Served) -> None:
    with at_terminal(served.home, "run", "sleep 300.0625") as terminal:
        eventually(lambda: runs("sleep", "300.0625"), "the command runs")
        served.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                terminal.type(CTRL_C)
                terminal.shows("ending the task")
            assert terminal.process.wait(DEADLINE_S) == 130
        finally:
            served.process.send_signal(signal.SIGCONT)
        terminal.shows("may go on. End it with: skep task cancel tsk_")
        (advice,) = set(re.findall(r"skep (task cancel tsk_\w+)", terminal.shown))
        served.home.done(*advice.split())
    eventually(lambda: not runs("sleep", "300.0625"), "the advice helps")


def test_a_task_is_followed_through_the_death_of_its_server(tmp_path: Path, warm_scripts: Path) -> None:
    home = furnish(tmp_path, warm_scripts)
    record = home.state / "run/server.json"
    with serving(home) as first:
        command = [str(home.skep), "run", "nap a while", "--json"]
        following = subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
        with following as process:
            assert process.stdout is not None
            events = [json.loads(process.stdout.readline())]
            eventually(lambda: runs("sleep", "30.125"), "the worker is in the middle of an act")
            first.process.kill()
            first.process.wait(DEADLINE_S)
            assert record.exists()  # and yet nobody takes it for a server
            assert home.run("task", "list").returncode == 0
            with serving(home, int(first.address.rpartition(":")[2])):
                events += map(json.loads, process.stdout)
                assert process.wait(DEADLINE_S) == 0
    assert not record.exists()
    numbers = [one["seq"] for one in events]
    assert numbers == sorted(set(numbers))
    assert [one["type"] for one in events].count("task_started") == 2
    (replied,) = [one["body"]["text"] for one in events if one["type"] == "replied"]
    assert replied.count("napped") == 1, "what may have taken effect is not done twice"


def test_a_port_that_is_taken_is_named(tmp_path: Path, warm_scripts: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ran = Home(tmp_path, warm_scripts / "skep").run("serve", "--port", str(port))
    assert ran.returncode == 2
    assert f"another program listens at 127.0.0.1:{port}" in ran.stderr


def test_only_a_server_loads_what_serves() -> None:
    code = (
        "import sys, skep.app.engine, skep.app.local, skep.app.remote, skep.app.waking, skep.cli.following;"
        "print({'fastapi', 'starlette', 'uvicorn', 'sse_starlette'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "set()\n"


@pytest.mark.parametrize(
    ("host", "public"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("a.example", True)],
)
def test_who_can_reach_a_server_is_told_by_its_address(host: str, public: bool) -> None:
    assert is_public(host) is public
