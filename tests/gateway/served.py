"""A server of a home of its own, as a program, with a rehearsal for a model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

import skep
from skep.app.program import open_program
from skep.config import Paths, Settings
from skep.gateway.tokens import Tokens

DEADLINE_S = 60.0

#: What the model says, by what the prompt asks for.
SCRIPT = """
about: For the tests of the gateway.
turns:
  - when: {role: classify, prompt: "^(count|sleep|ask|nap|give up)"}
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
    call: {tool: run_command, arguments: {command: "exec {{prompt}}", timeout_s: 290}}
  - when: {role: work, prompt: "^nap", results: 0}
    call: {tool: run_command, arguments: {command: "echo napped >> naps; exec sleep 30.125"}}
  - when: {role: work, prompt: "^nap", results: 1}
    call: {tool: run_command, arguments: {command: "cat naps"}}
  - when: {role: work, prompt: "^ask", results: 0}
    call: {tool: ask_user, arguments: {question: "Which colour?", choices: [red, blue]}}
  - when: {role: work, prompt: "^give up"}
    call: {tool: finish, arguments: {reply: "it cannot be done", confidence: 0.9, outcome: failed}}
  - when: {role: work}
    call: {tool: finish, arguments: {reply: "it was {{result}}", confidence: 0.9}}
  - when: {role: reply}
    reply: "You said: {{prompt}}"
"""


def environment(home: Path) -> dict[str, str]:
    """Return what a program of this home has in its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SKEP_", "XDG_"))}
    return {**kept, "HOME": str(home), "PYTHONPATH": str(Path(skep.__file__).parents[1]), "COLUMNS": "120"}


@dataclass(frozen=True, slots=True)
class Home:
    """A home whose model is a script, and the program that works in it."""

    folder: Path
    skep: Path

    @property
    def state(self) -> Path:
        return self.folder / ".local/share/skep"

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [self.skep, *words],
            env=environment(self.folder),
            stdin=options.pop("stdin", subprocess.DEVNULL),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            **options,
        )

    def done(self, *words: str) -> str:
        """Run a command that has to succeed; return what it printed."""
        ran = self.run(*words)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    def token(self, account: str = "default") -> str:
        return Tokens(self.state / "keys").of(account)


def furnish(folder: Path, scripts: Path) -> Home:
    """Make a home with the hive garden, and with the hive meadow of the account acme."""
    script, config = folder / "script.yaml", folder / ".config/skep/config.json"
    script.write_text(SCRIPT)
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"chat_models": [{"id": str(script), "provider": "rehearsal"}]}))
    home = Home(folder, scripts / "skep")

    async def settle() -> None:
        async with open_program(Paths.of(environment(folder)), Settings()) as program:
            for account, hive in (("default", "garden"), ("acme", "meadow")):
                await program.accounts.create(account)
                await program.hives.create(hive, account_id=account, actor="test")

    asyncio.run(settle())
    return home


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers."""

    home: Home
    address: str
    process: subprocess.Popen[str]

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.address, headers=headers, timeout=DEADLINE_S, trust_env=False)


@contextmanager
def serving(home: Home, port: int = 0) -> Iterator[Served]:
    """Run a server until the end of the block; it has to end well then, if it has not before."""
    with (
        (home.folder / "serve.err").open("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "skep", "serve", "--port", str(port), "--json"],
            env=environment(home.folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
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


def _said(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()


def runs(*words: str) -> bool:
    """Say whether a program with these words runs on this machine, in a sandbox or not."""
    wanted = b"\0".join(word.encode() for word in words) + b"\0"
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if (process / "cmdline").read_bytes() == wanted:
                return True
    return False


def eventually(true: Any, what: str) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := true()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)
    return found
