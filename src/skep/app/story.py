"""The part of the demo in which a hive works: a post is drafted, refused, thought about once, and sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from skep.app.board import Board, open_board
from skep.app.engine import open_engine
from skep.app.household import Household
from skep.app.program import Program, open_program
from skep.config import Environment, Paths, Settings
from skep.errors import Defect
from skep.state.events import Recorded
from skep.state.hives import Hive
from skep.tasks.task import Task

PROMPT = "Write a short post about the linden bloom, and publish it."
THREAD = "cli:demo"
_HOST = "posts.example"
_SKILL = """---
name: publish-post
description: Publish a short post from a file. Use it when a text has to go out.
metadata:
  idempotent: "true"
---

# Publish a post

`publish.py FILE` sends the text of a file. The answer is one line of JSON with a status and a message.
"""
_SCRIPT = f"""import json, os, sys, urllib.error, urllib.request

text = open(sys.argv[1]).read()
request = urllib.request.Request(
    "http://{_HOST}/posts",
    json.dumps({{"text": text}}).encode(),
    {{"Content-Type": "application/json", "Idempotency-Key": os.environ["SKEP_IDEMPOTENCY_KEY"]}},
)
try:
    answer = urllib.request.urlopen(request, timeout=10)
except urllib.error.HTTPError as error:
    answer = error
print(json.dumps({{"status": answer.status, **json.load(answer)}}))
"""


class Teller(Protocol):
    """Shows what happens in a task."""

    def tell(self, recorded: Recorded) -> None: ...

    def hush(self) -> None: ...


Tellers = Callable[[Task], Teller]


async def play(paths: Paths, account_id: str, hive_name: str, tellers: Tellers) -> tuple[Task, Board]:
    """Have a hive carry the prompt to its reply, with every part real but the model, and return both ends."""
    async with open_board() as board:
        settings = Settings.model_validate(
            {
                "chat_models": [{"id": "story", "provider": "rehearsal", "intelligence_level": "light"}],
                "policy": {"allowed_hosts": [_HOST], "upstreams": {_HOST: board.address}},
            }
        )
        async with open_program(paths, settings) as program:
            hive = await program.hives.show(hive_name, account_id=account_id)
            _give_skill(paths.home, hive)
            task = await _carry(program, Environment(paths, {}), hive, tellers)
    if task.status != "succeeded" or len(board.posts) != 1:
        raise Defect(f"the demo's task {task.status} with {len(board.posts)} posts: {task.error or task.reply}")
    return task, board


async def _carry(program: Program, environment: Environment, hive: Hive, tellers: Tellers) -> Task:
    async with open_engine(program, environment) as engine:
        tasks = engine.worker.tasks
        task = await tasks.submit(hive, PROMPT, thread=THREAD, actor="demo")
        teller = tellers(task)
        try:
            async for recorded in tasks.follow(task):
                teller.tell(recorded)
        finally:
            teller.hush()
        return await tasks.show(task.id, account_id=hive.account_id)


def _give_skill(home: Path, hive: Hive) -> None:
    household = Household(home, hive.id, hive.account_id, hive.name)
    household.settle()
    folder = household.skills["hive"] / "publish-post"
    (folder / "scripts").mkdir(parents=True, exist_ok=True)
    (folder / "SKILL.md").write_text(_SKILL)
    (folder / "scripts" / "publish.py").write_text(_SCRIPT)
