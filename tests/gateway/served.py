"""A server of a home of its own, as a program, with a rehearsal for a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

import skep

DEADLINE_S = 60.0

#: What the model says, by what the prompt asks for.
SCRIPT = """
about: For the tests of the gateway.
turns:
  - when: {role: classify, prompt: "^(count|sleep|ask)"}
    value: {kind: one, why: something has to be run}
  - when: {role: classify}
    value: {kind: reply, why: it is only talk}
  - when: {role: work, prompt: "^count", results: 0}
    call: {tool: run_command, arguments: {command: "seq 3"}}
  - when: {role: work, prompt: "^count", results: 1}
    call: {tool: write_file, arguments: {path: counted, content: "three"}}
  - when: {role: work, prompt: "^count", results: 2}
    call: {tool: finish, arguments: {reply: "three lines", confidence: 0.9}}
  - when: {role: work, prompt: "^sleep", results: 0}
    call: {tool: run_command, arguments: {command: "echo $$ > sleeping; exec sleep 300", timeout_s: 290}}
  - when: {role: work, prompt: "^ask", results: 0}
    call: {tool: ask_user, arguments: {question: "Which colour?", choices: [red, blue]}}
  - when: {role: work}
    call: {tool: finish, arguments: {reply: "it was {{result}}", confidence: 0.9}}
  - when: {role: reply}
    reply: "You said: {{prompt}}"
"""


def environment(home: Path) -> dict[str, str]:
    """Return what a program of this home has in its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SKEP_", "XDG_"))}
    return {**kept, "HOME": str(home), "PYTHONPATH": str(Path(skep.__file__).parents[1]), "COLUMNS": "120"}


def furnish(home: Path, **settings: Any) -> None:
    """Write a config.json whose model is the script."""
    script, config = home / "script.yaml", home / ".config/skep/config.json"
    script.write_text(SCRIPT)
    config.parent.mkdir(parents=True, exist_ok=True)
    models = [{"id": str(script), "provider": "rehearsal", "intelligence_level": "normal"}]
    config.write_text(json.dumps({"chat_models": models, **settings}))


def run(home: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of this home to its end."""
    return subprocess.run(
        [sys.executable, "-m", "skep", *words],
        env=environment(home),
        stdin=options.pop("stdin", subprocess.DEVNULL),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        **options,
    )


def done(home: Path, *words: str) -> str:
    """Run a command that has to succeed; return what it printed."""
    ran = run(home, *words)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers."""

    home: Path
    address: str
    process: subprocess.Popen[str]

    def token(self, account: str = "default") -> str:
        return done(self.home, "account", "token", account)

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.address, headers=headers, timeout=DEADLINE_S, trust_env=False)


@contextmanager
def serving(home: Path, *options: str) -> Iterator[Served]:
    """Run a server until the end of the block; it has to end well then, if it has not before."""
    errors = (home / "serve.err").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "skep", "serve", "--port", "0", "--json", *options],
        env=environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, _said(errors)
        yield Served(home, json.loads(line)["address"], process)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0, _said(errors)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
        errors.close()


def _said(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()


def eventually(true: Any, what: str) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := true()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)
    return found
