"""A home with hives and a server over it, and the models that it asks: real processes, real HTTP, nothing patched."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.models.servers import SERVER_ERROR, Call, ModelServer, Protocol, Received, Say, Turn

import skep
from skep.app.program import open_program
from skep.config import Paths, Settings
from skep.state.flags import DEFAULT, Flags

PATIENCE_S = 60
_CASE = re.compile(r"case-[a-z0-9-]+")


def until(found: Callable[[], Any], what: str) -> Any:
    """Return what `found` gives as soon as it gives something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return value


def finish(reply: str = "Done.", confidence: float = 0.9, outcome: str = "done") -> Say:
    return Say(calls=(Call("finish", {"reply": reply, "confidence": confidence, "outcome": outcome}),))


def command(line: str, **more: Any) -> Say:
    return Say(calls=(Call("run_command", {"command": line, **more}),))


@dataclass
class Story:
    """What the models answer about one case: each list is used up by the calls of its level."""

    work: list[Turn]
    classify: list[Turn] = field(default_factory=list)
    #: Of this protocol nothing comes but errors.
    broken: Protocol | None = None
    reflection: str = "Try it the other way."
    received: list[Received] = field(default_factory=list)

    def requests(self, level: str) -> list[Received]:
        return [one for one in self.received if one.model.startswith(level)]


class Narrator:
    """Answers every request by the story whose case the prompt names."""

    def __init__(self) -> None:
        self._stories: dict[str, Story] = {}
        self._lock = threading.Lock()

    def tell(self, case: str, *work: Turn, **more: Any) -> Story:
        """Keep a story for prompts that hold `case`."""
        story = self._stories[case] = Story(list(work), **more)
        return story

    def __call__(self, received: Received) -> Turn:
        found = _CASE.findall(received.text)
        story = self._stories[found[-1]]
        with self._lock:
            story.received.append(received)
            if received.protocol == story.broken:
                return SERVER_ERROR
            if "<evidence>" in received.text:
                return Say(story.reflection)
            if "Decide how a prompt is to be answered" in received.system:
                return story.classify.pop(0) if story.classify else Say(value={"kind": "one", "why": "one thing"})
            if not received.tools:
                return Say("This is what there is.")
            return story.work.pop(0) if story.work else finish("The story is over.")


@dataclass
class Outcome:
    """How a task ended, and all that happened on its way."""

    task: dict[str, Any]
    events: list[dict[str, Any]]

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def healed(self) -> list[tuple[str, int, str, str]]:
        return [(one["failure"], one["tier"], one["rule"], one["remedy"]) for one in self.all("healed")]

    @property
    def observations(self) -> list[dict[str, Any]]:
        return [one["observation"] for one in self.all("observed")]


@dataclass
class House:
    """A person's home folder, with config.json and hives, and the models over one narrator."""

    home: Path
    narrator: Narrator
    models: ModelServer
    server: subprocess.Popen[str] | None = None
    address: str = ""
    token: str = ""

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SKEP_", "XDG_"))}
        keys = {"OPENAI_API_KEY": "sk-secret-openai", "ANTHROPIC_API_KEY": "sk-secret-anthropic"}
        source = str(Path(skep.__file__).parents[1])
        return {**kept, **keys, "HOME": str(self.home), "PYTHONPATH": source, "COLUMNS": "120"}

    def configure(self, *protocols: Protocol, **settings: Any) -> None:
        """Write config.json: of each provider a light, a normal and a super model, the first provider first."""
        models = [
            {
                "provider": protocol,
                "id": f"{level}-{protocol}",
                "intelligence_level": level,
                "base_url": self.models.base_url(protocol),
            }
            for protocol in protocols
            for level in ("light", "normal", "super")
        ]
        file = self.home / ".config/skep/config.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"chat_models": models, "gateway": {"port": 0}, **settings}))

    async def settle(self, hives: dict[str, Flags]) -> None:
        """Make hives: of the account `default`, or of another where the name is account/hive."""
        async with open_program(Paths.of({"HOME": str(self.home)}), Settings()) as program:
            for name, flags in hives.items():
                account, _, hive = name.rpartition("/")
                await program.accounts.ensure(account or "default")
                await program.hives.create(hive, account_id=account or "default", actor="test", flags=flags)

    def skep(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command as a program of its own."""
        return subprocess.run(
            [sys.executable, "-m", "skep", *words],
            env=self.environment,
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Run `skep serve` until the end of the block."""
        with (self.home / "serve.log").open("w") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "skep", "serve", "--port", "0", "--json"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            try:
                assert self.server.stdout is not None
                with self.server.stdout as stdout:
                    line = stdout.readline()
                assert line, (self.home / "serve.log").read_text()
                told = json.loads(line)
                self.address, self.token = told["address"], Path(told["token_file"]).read_text().strip()
                yield
            finally:
                self.server.send_signal(signal.SIGTERM)
                try:
                    self.server.wait(30)
                finally:
                    self.server.kill()
                    self.server.wait()

    def http(self, method: str, path: str, *, token: str | None = None, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token or self.token}"}
        return httpx.request(method, self.address + path, headers=headers, timeout=PATIENCE_S, trust_env=False, **more)

    def submit(self, prompt: str, *, hive: str = "garden", thread: str | None = None) -> dict[str, Any]:
        """Ask for something; by default in a thread of its own, so that it waits for nothing."""
        asked = {"prompt": prompt, "thread": thread or f"api:{abs(hash(prompt))}"}
        answer = self.http("POST", f"/api/hives/{hive}/prompt", json=asked)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    def outcome(self, task: dict[str, Any]) -> Outcome:
        """Wait for the end of a task, and read all that happened."""
        ended = self.http("GET", f"/api/tasks/{task['id']}?wait={PATIENCE_S - 5}").json()
        assert ended["ended_at"], ended
        told = self.http("GET", f"/api/tasks/{task['id']}/events").text
        events = [json.loads(line.removeprefix("data:")) for line in told.splitlines() if line.startswith("data:")]
        return Outcome(ended, [{"type": event["type"], **event["body"]} for event in events])

    def ask(self, prompt: str, **more: Any) -> Outcome:
        return self.outcome(self.submit(prompt, **more))


def descendants(pid: int) -> list[int]:
    """Return the processes below one, children first."""
    children = [int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()]
    return children + [one for child in children for one in descendants(child)]


def plant(home: Path, name: str, script: str, *, fallback: str = "") -> None:
    """Put a skill with one script on the shelf of everybody."""
    folder = home / ".local/share/skep/skills" / name
    (folder / "scripts").mkdir(parents=True)
    more = f"  fallback: {fallback}\n" if fallback else ""
    head = f'---\nname: {name}\ndescription: Made for a test.\nmetadata:\n  version: "1"\n{more}---\n'
    (folder / "SKILL.md").write_text(head)
    (folder / "scripts" / "run.sh").write_text(script)


def skill(name: str, *arguments: str) -> Say:
    return Say(calls=(Call("use_skill", {"skill": f"system/{name}", "script": "run.sh", "arguments": arguments}),))


def named(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextmanager
def house(home: Path, *protocols: Protocol, hives: dict[str, Flags] | None = None, **settings: Any) -> Iterator[House]:
    """Give a home with hives whose models speak the protocols."""
    narrator = Narrator()
    with ModelServer(narrator) as models:
        made = House(home, narrator, models)
        made.configure(*protocols, **settings)
        asyncio.run(made.settle(hives or {"garden": DEFAULT}))
        yield made
