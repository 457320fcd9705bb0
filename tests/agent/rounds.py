"""One task that uses each tool, on whatever holds the sandbox: python -m tests.agent.rounds HOME SETTINGS

Prints the observations as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.sessions.yard import prepare_home

from skep.app.choosing import Chooser
from skep.app.household import Household
from skep.app.program import open_program
from skep.app.reception import open_sessions
from skep.config import Paths, Settings
from skep.config.secrets import CloudKeys
from skep.governance.ruling import Policy
from skep.models.models import Models
from skep.models.spec import ModelSpec
from skep.state.events import Observed
from skep.tasks.workshop import House, Workshop, open_worker

SCRIPT = r"""
turns:
 - when: {role: work, results: 0}
   call: {tool: write_file, arguments: {path: notes/bee.txt, content: "one\ntwo\n"}}
 - when: {role: work, results: 1}
   call: {tool: edit_file, arguments: {path: notes/bee.txt, old: two, new: "2"}}
 - when: {role: work, results: 2}
   call: {tool: read_file, arguments: {path: /workspace/notes/bee.txt}}
 - when: {role: work, results: 3}
   call: {tool: list_files, arguments: {path: notes}}
 - when: {role: work, results: 4}
   call: {tool: run_command, arguments: {command: "cd notes && NAME=bee && cat bee.txt"}}
 - when: {role: work, results: 5}
   call: {tool: run_command, arguments: {command: "pwd; echo $NAME; cd ..; seq 20000; (exit 3)"}}
 - when: {role: work, results: 6}
   call: {tool: run_python, arguments: {code: "x = 6 * 7; print('hi'); x", timeout_s: 60}}
 - when: {role: work, results: 7}
   call: {tool: run_python, arguments: {code: "open('notes/bee.txt').read() * 2 if x == 42 else 0"}}
 - when: {role: work, results: 8}
   call: {tool: write_file, arguments: {path: /workspace/checks/test_bee.py, content: "TEST"}}
 - when: {role: work, results: 9}
   call: {tool: run_tests, arguments: {command: python3 -m unittest, paths: [checks/test_bee.py]}}
 - when: {role: work, results: 10}
   call: {tool: use_skill, arguments: {skill: hive/post, script: post.sh, arguments: [hello]}}
 - when: {role: work, results: 11}
   call:
     tool: edit_file
     arguments: {path: hive/MEMORY.md, old: "<!-- scratchpad -->", new: "<!-- scratchpad -->\nA bee."}
 - when: {role: work, results: 12}
   call: {tool: run_command, arguments: {command: "exec python3 -um http.server PORT", background: true}}
 - when: {role: work, results: 13}
   call:
     tool: run_command
     arguments: {command: "until (: < /dev/tcp/127.0.0.1/PORT) 2> /dev/null; do sleep 0.05; done"}
 - when: {role: work, results: 14, anywhere: '"command_started", "job": "(?P<job>[^"]+)"'}
   call: {tool: poll_command, arguments: {job: "{{job}}", wait_s: 0.1}}
 - when: {role: work, results: 15}
   call: {tool: expose_port, arguments: {port: PORT}}
 - when: {role: work, results: 16, anywhere: '"command_started", "job": "(?P<job>[^"]+)"'}
   call: {tool: stop_command, arguments: {job: "{{job}}"}}
 - when: {role: work}
   call: {tool: finish, arguments: {reply: done, confidence: 1}}
"""
TEST = (
    r"import unittest\nclass T(unittest.TestCase):\n  def test_a(self): pass\n"
    r"  @unittest.expectedFailure\n  def test_b(self): self.fail()\n"
)
#: What comes of the acts of the script, in their order.
KINDS = """
file_written file_edited file_read listed command_ended command_ended cell_ran cell_ran
file_written tests_ran skill_ran file_edited
command_started command_ended command_polled port_exposed command_polled
"""
SKILL = "---\nname: post\ndescription: Posts.\n---\n"
POST = """echo "$1 $SKEP_SKILL"; test -n "$SKEP_IDEMPOTENCY_KEY" && echo '{"status": 201}'\n"""


def _furnish(home: Path, household: Household) -> Models:
    household.settle()
    folder = household.skills["hive"] / "post" / "scripts"
    folder.mkdir(parents=True)
    (folder.parent / "SKILL.md").write_text(SKILL)
    (folder / "post.sh").write_text(POST)
    port = 20_000 + os.getpid() % 20_000  # some of these sandboxes share their network with each other
    (home / "script.yaml").write_text(SCRIPT.replace("TEST", TEST).replace("PORT", str(port)))
    return Models([ModelSpec("rehearsal", str(home / "script.yaml"))])


async def go_round(
    home: Path, sandbox: dict[str, Any], *, variables: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Have a worker do it all; return what came of each act."""
    settings = Settings.model_validate({"sandbox": sandbox})
    paths = Paths(config=home / "config.json", home=home, logs=home / "log")
    async with open_program(paths, settings) as program:
        await program.accounts.create("bees")
        hive = await program.hives.create("garden", account_id="bees", actor="test")
        household = Household(home, hive.id, "bees", "garden")
        chooser = Chooser(settings, CloudKeys.of(variables or {}), program=program)
        async with (
            _furnish(home, household) as models,
            open_sessions(program, chooser=chooser) as sessions,
            open_worker(
                Workshop(
                    database=program.database,
                    log=program.log,
                    hives=program.hives,
                    leases=program.leases,
                    sessions=sessions,
                    models=models,
                    host="here",
                    household=lambda _: House(household.folder, household.skills),
                    policy=Policy(may_reach_out=frozenset({"expose_port"})),
                )
            ) as worker,
        ):
            task = await worker.tasks.submit(hive, "Use everything", actor="test")
            task = await worker.tasks.wait(task.id, account_id="bees", timeout_s=100)
            recorded = await program.log.page(hive.id, limit=1000)
        seen = [one.event.observation for one in recorded if isinstance(one.event, Observed)]
        assert task.status == "succeeded", (task.error, [one["kind"] for one in seen])
        return seen


def check(seen: list[dict[str, Any]]) -> None:
    """See that every tool did what it says."""
    kinds = [one["kind"] for one in seen]
    written, edited, read, listed, first, second, python, again, test, tests, skill, memory, *rest = seen
    assert kinds == KINDS.split(), [one for one in seen if one["kind"] == "trouble"]
    assert (written["size"], edited["replaced"], read["text"]) == (8, 1, "one\n2\n")
    assert [one["path"] for one in listed["entries"]] == ["/workspace/notes/bee.txt"]
    assert first["stdout"] == "one\n2\n"
    assert second["exit_code"] == 3 and "/notes\nbee\n1\n2\n" in second["stdout"]
    assert second["truncated"] and second["spooled_to"] == "/workspace/.skep/output/6-1.txt"
    assert (python["value"], python["stdout"], again["value"]) == ("42", "hi\n", "'one\\n2\\none\\n2\\n'")
    assert (tests["exit_code"], skill["status"]) == (0, 201) and skill["stdout"].startswith("hello hive/post\n")
    started, _, polled, exposed, stopped = rest
    assert polled["running"] and exposed["link"].startswith("http://") and not stopped["running"]
    assert polled["job"] == started["job"] == stopped["job"] and test["size"] and memory["replaced"] == 1


if __name__ == "__main__":
    place = Path(sys.argv[1])
    prepare_home(place)
    check(asyncio.run(go_round(place, json.loads(sys.argv[2]))))
    print("done")
