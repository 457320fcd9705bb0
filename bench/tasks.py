"""What it costs that a task survives everything: against the same loop that survives nothing, and fifty at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml
from pydantic_ai.messages import ModelMessage, ModelRequest, SystemPromptPart, UserPromptPart

from bench.contest import Contender, compete
from bench.report import Section
from skep.agent.conversation import Conversation, Thought
from skep.agent.desk import Desk
from skep.agent.loop import Brief, Call, Finished, Limits, work
from skep.agent.observations import Observation
from skep.agent.toolbox import Toolbox
from skep.app.engine import Engine, open_engine
from skep.app.modelling import build_models
from skep.app.program import open_program
from skep.config import Environment, Paths, Settings
from skep.governance.ruling import Policy, Ruling, rule
from skep.healing.guard import LoopGuard
from skep.models.exchange import Request
from skep.models.models import Models
from skep.state.hives import Hive
from skep.tasks.brief import worker_instructions
from skep.tasks.queen import Classification

ACCOUNT, PROMPT = "default", "Do the ten things."
ROUNDS, TOOLS, AT_ONCE, FOLLOWED = 25, 10, 50, 20
MEMORY_MB, P95_MS, FACTOR, EXTRA_S = 400, 30, 2.0, 0.060
#: A server that has nothing to do is looked at for IDLE_S, once what it does at its start is over.
SETTLE_S, IDLE_S, IDLE_PERCENT = 5.0, 20.0, 2.0

METHOD = f"""\
The model is a script, so what is left is Skep's own work. A task makes one call to classify its prompt and
{TOOLS + 1} to work, and uses {TOOLS} tools in a sandbox that runs: commands in a shell, files written and read.
"durable" is a task on SQLite from its submission to its end on record: queued, each step kept, each event in the log
before the next act. "plain" is the same loop with the same tools, the same model and the same sandbox, without a queue,
a step or a record; both take turns, {ROUNDS} rounds. The {AT_ONCE} tasks are prompted over HTTP in the same moment,
each on a thread with a new workspace of its own, at a server on two processors; its memory is the most that the process
`skep serve` ever had. The delay of an event is the time between its own timestamp and its arrival at a client that
follows the task: of {FOLLOWED} tasks one after the other, and again while the {AT_ONCE} run. A server is idle that has
carried no task and has no client; its share is the processor time of its process in {IDLE_S:.0f} s.
"""


def measure() -> Section:
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[:2])
    try:
        with tempfile.TemporaryDirectory(prefix="skep-bench-", dir="/var/tmp") as folder:
            Path(folder).chmod(0o755)
            home = Home(Path(folder))
            rows = [*asyncio.run(_durability(home)), *asyncio.run(_server(home))]
    finally:
        os.sched_setaffinity(0, all_cores)
    return Section("tasks", "Tasks", METHOD, ("what", "figure", "against", "goal"), rows)


def script() -> dict[str, Any]:
    """Return what the model says: ten calls, and then the end."""
    kinds: tuple[tuple[str, dict[str, str]], ...] = (
        ("run_command", {"command": "echo {}"}),
        ("write_file", {"path": "bench/{}.txt", "content": "number {}"}),
        ("run_command", {"command": "cat bench/*.txt | wc -c; echo {}"}),
        ("read_file", {"path": "bench/{}.txt"}),
    )
    turns: list[dict[str, Any]] = [{"when": {"role": "classify"}, "value": {"kind": "one", "why": "it is work"}}]
    for number in range(TOOLS):
        tool, arguments = kinds[number % len(kinds)]
        # A file is read two calls after the one that wrote it.
        place = number - 2 if tool == "read_file" else number
        filled = {name: text.format(place) for name, text in arguments.items()}
        turns.append({"when": {"role": "work", "results": number}, "call": {"tool": tool, "arguments": filled}})
    end = {"reply": "Done.", "confidence": 0.9}
    turns.append({"when": {"role": "work"}, "call": {"tool": "finish", "arguments": end}})
    return {"about": "Ten tools.", "turns": turns}


@dataclass(frozen=True, slots=True)
class Home:
    """A home of its own, whose model is the script."""

    folder: Path

    def __post_init__(self) -> None:
        play, config = self.folder / "play.yaml", self.folder / ".config/skep/config.json"
        play.write_text(yaml.safe_dump(script(), sort_keys=False))
        config.parent.mkdir(parents=True)
        config.write_text(json.dumps(self.settings))

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "chat_models": [{"provider": "rehearsal", "id": str(self.folder / "play.yaml")}],
            "workspace": {"template": "minimal"},
            "tasks": {"concurrent": AT_ONCE, "concurrent_per_account": AT_ONCE},
        }

    @property
    def environment(self) -> Environment:
        variables = {"HOME": str(self.folder), "PATH": os.environ.get("PATH", "")}
        return Environment(Paths.of(variables), variables)


async def _durability(home: Home) -> list[list[str]]:
    print("measuring durability …", flush=True)
    settings = Settings.model_validate(home.settings)
    async with (
        open_program(home.environment.paths, settings) as program,
        build_models(settings, home.environment) as models,
    ):
        await program.accounts.ensure(ACCOUNT)
        hive = await program.hives.create("bench", account_id=ACCOUNT, actor="bench")
        async with open_engine(program, home.environment) as engine:
            place = Workplace(engine, models, hive, home.folder)
            durable, plain = Contender("durable", place.durable, ROUNDS), Contender("plain", place.plain, ROUNDS)
            await compete([durable, plain])
    most = FACTOR * plain.median + EXTRA_S
    figure = f"{_ms(durable.median)}, p95 {_ms(durable.p95)}"
    against = (
        f"plain {_ms(plain.median)}, p95 {_ms(plain.p95)}: {durable.median / plain.median:.2f} x,"
        f" + {_ms(durable.median - plain.median)}; at most {_ms(most)}"
    )
    return [[f"a task of {TOOLS} tools", figure, against, "<= 2.0 x + 60 ms"]]


class Plain:
    """The steps of the loop with nothing behind them."""

    def __init__(self, models: Models, toolbox: Toolbox, desk: Desk) -> None:
        self._models = models
        self._toolbox = toolbox
        self._desk = desk

    async def think(self, messages: Sequence[ModelMessage], step: int) -> Thought:
        answer = await self._models.ask(Request("work", messages, self._toolbox.definitions))
        return Thought(answer.response, answer.spend.tokens, answer.spend.usd, datetime.now(UTC), 0.0)

    async def rule(self, call: Call) -> Ruling:
        return rule(self._toolbox.asked(call.action), Policy())

    async def approve(self, call: Call, why: str) -> Ruling:
        return Ruling("deny", why)

    async def act(self, call: Call) -> Observation:
        return await self._toolbox.perform(call.action, self._desk)


@dataclass(slots=True)
class Workplace:
    """One hive whose sandbox runs, and the two ways to carry a task in it."""

    engine: Engine
    models: Models
    hive: Hive
    folder: Path
    rounds: int = 0

    def _thread(self) -> str:
        """Name a new thread: its history is empty, and its computer is the hive's."""
        self.rounds += 1
        return f"cli:bench-{self.rounds}"

    async def durable(self) -> float:
        tasks = self.engine.worker.tasks
        began = time.perf_counter()
        task = await tasks.submit(self.hive, PROMPT, thread=self._thread(), actor="bench")
        ended = await tasks.wait(task.id, account_id=ACCOUNT, timeout_s=120)
        took = time.perf_counter() - began
        if ended.status != "succeeded" or ended.reply != "Done.":
            raise RuntimeError(f"the task came to {ended.status}: {ended.error}")
        return took

    async def plain(self) -> float:
        began = time.perf_counter()
        asked = ModelRequest(parts=[SystemPromptPart("Decide."), UserPromptPart(PROMPT)])
        await self.models.ask(Request("classify", [asked], schema=Classification))
        resolve = partial(self.engine.sessions.resolve, self.hive, self._thread(), account_id=ACCOUNT)
        desk, toolbox = Desk(resolve, room="main", household=self.folder), Toolbox()
        talk = Conversation.begin(worker_instructions(self.hive, ""), PROMPT)
        brief = Brief("bench", "worker", talk, toolbox)
        try:
            async with aclosing(work(brief, Plain(self.models, toolbox, desk), Limits(), LoopGuard())) as happenings:
                events = [one async for one in happenings]
        finally:
            await desk.close()
        took = time.perf_counter() - began
        if not isinstance(events[-1], Finished) or events[-1].reply != "Done.":
            raise RuntimeError(f"the loop came to {events[-1]}")
        return took


async def _server(home: Home) -> list[list[str]]:
    with serving(home) as server:
        headers = {"Authorization": f"Bearer {server.token}"}
        limits = httpx.Limits(max_connections=4 * AT_ONCE)
        async with httpx.AsyncClient(
            base_url=server.address, headers=headers, timeout=300, trust_env=False, limits=limits
        ) as http:
            client = Client(http)
            idle = await _idle(server)
            print("measuring events …", flush=True)
            await client.carry("cli:warm", [])
            for number in range(FOLLOWED):
                await client.carry(f"cli:followed-{number}", client.alone)
            home_run(home, "hive", "set", "bench", "threads=thread")
            print("measuring many …", flush=True)
            row = await _many(server, client)
    alone, crowd = _p95(client.alone), _p95(client.crowd)
    delay = f"p95 {_ms(alone)}, median {_ms(statistics.median(client.alone))}"
    against = f"{len(client.alone)} events; p95 {_ms(crowd)} while {AT_ONCE} tasks run"
    return [row, idle, ["an event to a client that follows", delay, against, f"p95 <= {P95_MS} ms"]]


async def _idle(server: Server) -> list[str]:
    print("measuring idleness …", flush=True)
    await asyncio.sleep(SETTLE_S)
    before, began = server.cpu_s(), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    share = (server.cpu_s() - before) / (time.perf_counter() - began)
    return ["an idle server", f"{share:.1%} of a processor", f"{IDLE_S:.0f} s", f"< {IDLE_PERCENT:.0f} %"]


async def _many(server: Server, client: Client) -> list[str]:
    before = server.memory_mb()
    began = time.perf_counter()
    ends = await asyncio.gather(
        *(client.carry(f"cli:many-{number}", client.crowd) for number in range(AT_ONCE)), return_exceptions=True
    )
    took = time.perf_counter() - began
    failed = [end for end in ends if end != "succeeded"]
    told = f"; the first: {failed[0]!r}" if failed else ""
    figure = f"{took:.1f} s, {len(failed)} failed{told}; {server.memory_mb()} MB at most"
    against = f"{before} MB before; {AT_ONCE * TOOLS / took:.0f} tools a second"
    return [f"{AT_ONCE} tasks at once", figure, against, f"none fails, < {MEMORY_MB} MB"]


@dataclass(slots=True)
class Client:
    """Prompts over HTTP, and the delays of the events that came back."""

    http: httpx.AsyncClient
    alone: list[float] = field(default_factory=list)
    crowd: list[float] = field(default_factory=list)

    async def carry(self, thread: str, delays: list[float]) -> str:
        """Prompt, follow to the end, and return the status."""
        told = await self.http.post("/api/hives/bench/prompt", json={"prompt": PROMPT, "thread": thread})
        task = told.raise_for_status().json()["id"]
        async with self.http.stream("GET", f"/api/tasks/{task}/events") as stream:
            first = datetime.now(UTC)
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    now = datetime.now(UTC)
                    at = datetime.fromisoformat(json.loads(line.removeprefix("data: "))["at"])
                    if at > first:  # what happened before is not sent as it happens
                        delays.append((now - at).total_seconds())
        ended = await self.http.get(f"/api/tasks/{task}")
        return str(ended.raise_for_status().json()["status"])


@dataclass(frozen=True, slots=True)
class Server:
    """The process `skep serve`."""

    pid: int
    address: str
    token: str

    def cpu_s(self) -> float:
        """Return the processor time that the process has taken so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> int:
        """Return the most memory that the process has had, in units of a million bytes."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 // 1_000_000 for line in lines if line.startswith("VmHWM"))


def home_run(home: Home, *words: str) -> None:
    variables = dict(home.environment.variables)
    subprocess.run([sys.executable, "-m", "skep", *words], env=variables, check=True, capture_output=True, timeout=60)


@contextmanager
def serving(home: Home) -> Iterator[Server]:
    command = [sys.executable, "-m", "skep", "serve", "--port", "0", "--json"]
    with subprocess.Popen(
        command, env=dict(home.environment.variables), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            yield Server(process.pid, told["address"], Path(told["token_file"]).read_text().strip())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _p95(figures: Sequence[float]) -> float:
    return statistics.quantiles(figures, n=20, method="inclusive")[-1]
