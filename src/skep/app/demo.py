"""A short story that shows what works: a prompt, healing, many writers, a live tail, a verified log, forgers caught."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from skep.app.program import Program, open_program, signing_key
from skep.app.story import PROMPT, Tellers, play
from skep.config import Paths, Settings
from skep.errors import Conflict, Defect, SandboxUnusable
from skep.state.chain import Verdict, verify
from skep.state.checkpoint import Signer
from skep.state.database import Database
from skep.state.events import Noted, Prompted, Recorded, Replied
from skep.state.hives import Hive

WRITERS = ("ada", "bo", "cleo", "dara", "eli", "fay", "gus", "hana")
ROUNDS = 12
SHOWN = 8
ACCOUNT = "demo"
WRITING = "press"
_FLOWERS = ("clover", "lavender", "heather", "linden", "borage", "thyme", "willow", "apple")


@dataclass(slots=True)
class Seen:
    """What the one who follows the log has seen so far."""

    last: deque[Recorded] = field(default_factory=lambda: deque(maxlen=SHOWN))
    seqs: list[int] = field(default_factory=list)

    def add(self, recorded: Recorded) -> None:
        self.last.append(recorded)
        self.seqs.append(recorded.seq)


async def run_demo(console: Console, tellers: Tellers, *, keep: Path | None = None) -> None:
    """Tell the story on the console, in a throwaway home unless one is named to be kept."""
    with _home(console, keep) as home:
        paths = Paths(config=home / "config.json", home=home, logs=home / "log")
        async with open_program(paths, Settings()) as program:
            hive = await _make_hives(console, program)
        await _carry_a_prompt(console, paths, tellers)
        async with open_program(paths, Settings()) as program:
            await _watch_writers(console, program, hive)
        signer = Signer.open(signing_key(paths))
        await _verify_log(console, home / "skep.db", signer)
        await _catch_forgers(console, home, hive, signer)
    _point_onwards(console, keep)


@contextmanager
def _home(console: Console, keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        try:
            keep.mkdir(parents=True)
        except FileExistsError:
            raise Conflict(f"{keep} exists already", hint="name a folder that does not exist yet") from None
        home, fate = keep.absolute(), "which stays"
    else:
        home, fate = (
            Path(tempfile.mkdtemp(prefix="skep-demo-")),
            "removed at the end; --keep FOLDER keeps one",
        )
    console.print("\n[bold]Skep demo[/bold]")
    console.print(f"[dim]in {home}, {fate}[/dim]", soft_wrap=True)
    try:
        yield home
    finally:
        if keep is None:
            shutil.rmtree(home)


async def _make_hives(console: Console, program: Program) -> Hive:
    _heading(console, 1, "Two hives")
    await program.accounts.create(ACCOUNT)
    for name in (WRITING, "garden"):
        hive = await program.hives.create(name, account_id=ACCOUNT, actor="demo")
        _done(console, f"made [bold]{hive.name}[/bold] [dim]({hive.id})[/dim] in account {hive.account_id}")
    return hive


async def _carry_a_prompt(console: Console, paths: Paths, tellers: Tellers) -> None:
    _heading(console, 2, "A prompt is carried to its reply, and what fails on the way is healed")
    console.print(
        "[dim]     the model is scripted and needs no key; the sandbox, the skill and the service are real[/dim]"
    )
    console.print(f"     [cyan]{PROMPT}[/cyan]")
    try:
        task, board = await play(paths, ACCOUNT, WRITING, tellers)
    except SandboxUnusable as error:
        console.print(f"     [yellow]left out[/yellow]  {error.message}; see: skep doctor")
        return
    console.print(Padding(Text(task.reply or "", "green"), (0, 0, 0, 5)))
    _done(console, f"{task.status} at attempt {task.attempt}, {task.confidence or 0:.0%} sure")
    (post,) = board.posts.values()
    _done(console, f"the service has one post: {' '.join(post.split())[:50]}…")


async def _watch_writers(console: Console, program: Program, hive: Hive) -> None:
    _heading(console, 3, f"{len(WRITERS)} writers at once, followed live by a reader")
    total = 1 + len(WRITERS) * ROUNDS  # the making of the hive is on record too
    seen = Seen()
    began = time.monotonic()
    with Live(_tail(seen), console=console, refresh_per_second=20, transient=True) as live:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(_follow(program, hive, seen, total=total, live=live))
            for number, name in enumerate(WRITERS):
                group.create_task(_write(program, hive, name, number))
    took = time.monotonic() - began
    console.print(_tail(seen))
    if seen.seqs != list(range(1, total + 1)):
        raise Defect(f"the reader saw {len(seen.seqs)} of {total} events, or not in order")
    _done(console, f"{total} events in {took:.1f} s, each on disk before its writer went on")
    _done(console, f"the reader saw 1 to {total}: no gap, no repetition")


async def _follow(program: Program, hive: Hive, seen: Seen, *, total: int, live: Live) -> None:
    async for recorded in program.log.follow(hive.id):
        seen.add(recorded)
        live.update(_tail(seen))
        if len(seen.seqs) == total:
            return


async def _write(program: Program, hive: Hive, name: str, number: int) -> None:
    for round_ in range(ROUNDS):
        flower = _FLOWERS[(number + round_) % len(_FLOWERS)]
        event = (
            Prompted(text=f"How much {flower} is in bloom?")
            if round_ % 3 == 0
            else Replied(text=f"{flower}: {3 + (number * 7 + round_ * 5) % 40} bees counted")
            if round_ % 3 == 1
            else Noted(text=f"{flower} does well by the wall")
        )
        await program.log.append(event, hive_id=hive.id, account_id=ACCOUNT, actor=name, task_id=f"round-{round_}")
        # A pace that the eye can follow, and a different one for each writer, so that they interleave.
        await asyncio.sleep(0.05 + 0.01 * ((number * 3 + round_) % 7))


def _tail(seen: Seen) -> Group:
    colours = {"prompted": "cyan", "replied": "green", "noted": "yellow"}
    lines = [
        Text.assemble(
            (f"     {recorded.seq:>4}  ", "dim"),
            (f"{recorded.at:%H:%M:%S.%f}"[:12] + "  ", "dim"),
            (f"{recorded.actor:<6}", "bold"),
            (f"{recorded.event.type:<14}", colours.get(recorded.event.type, "magenta")),
            getattr(recorded.event, "text", ""),
            no_wrap=True,
            overflow="ellipsis",
        )
        for recorded in seen.last
    ]
    return Group(*lines)


async def _verify_log(console: Console, file: Path, signer: Signer) -> None:
    _heading(console, 4, "Verified")
    verdict = await _judge(file, signer)
    if not verdict.ok:
        raise Defect(f"the log of the demo does not verify: {verdict.first_bad}")
    _done(console, f"{verdict.count} records chained by SHA-256, the end signed with Ed25519")


async def _catch_forgers(console: Console, home: Path, hive: Hive, signer: Signer) -> None:
    _heading(console, 5, "A forger at work on copies of the database")
    its, victim = f"AND hive_id = '{hive.id}'", 1 + len(WRITERS) * ROUNDS // 2
    forged = _copy(home, "forged.db", [f"UPDATE skep_events SET record = {_FORGED} WHERE seq = {victim} {its}"])  # noqa: S608
    await _expose(console, forged, signer, f"rewrote record {victim}")
    last = len(WRITERS) * ROUNDS - 2
    cut = _copy(
        home,
        "cut.db",
        [
            f"DELETE FROM skep_events WHERE seq > {last} {its}",  # noqa: S608
            f"UPDATE skep_event_heads SET seq = {last}, checkpoint_seq = 0, hash = "  # noqa: S608
            f"(SELECT hash FROM skep_events WHERE seq = {last} {its}) WHERE true {its}",
            f"DELETE FROM skep_checkpoints WHERE true {its}",  # noqa: S608
        ],
    )
    await _expose(console, cut, signer, "cut the last 3 records off, with every trace in the database")


_FORGED = 'replace(record, \'"text":"\', \'"text":"not \')'


def _copy(home: Path, name: str, changes: list[str]) -> Path:
    """Copy the database and change it as somebody could who has the file and knows SQL."""
    copy = home / name
    with closing(sqlite3.connect(home / "skep.db")) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
        triggers = target.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for (trigger,) in triggers:  # the triggers refuse changes, so a forger takes them away first
            target.execute(f'DROP TRIGGER "{trigger}"')
        for change in changes:
            target.execute(change)
        target.commit()
    return copy


async def _expose(console: Console, file: Path, signer: Signer, deed: str) -> None:
    verdict = await _judge(file, signer)
    if verdict.first_bad is None:
        raise Defect(f"the forger {deed}, and verify did not see it")
    fault = verdict.first_bad
    console.print(f"     [red]forged[/red]  {deed}")
    caught = Table.grid(padding=(0, 2, 0, 0))
    caught.add_row(Text("     caught", "green"), Text(f"record {fault.seq}: {fault.reason}"))
    console.print(caught)


async def _judge(file: Path, signer: Signer) -> Verdict:
    database = await Database.open(f"sqlite:///{file}", migrate=False)
    try:
        return await verify(database, signer=signer)
    finally:
        await database.close()


def _point_onwards(console: Console, keep: Path | None) -> None:
    console.print("\n[bold]Next[/bold]")
    if keep is not None:
        folder = keep.absolute()
        console.print(f"     [green]$[/green] SKEP_HOME={folder} skep events list garden -a {ACCOUNT}", soft_wrap=True)
    for command, purpose in (
        ("skep doctor", "check this machine"),
        ("skep hive create garden", "make a hive of your own"),
        ("skep run '…'", "ask it for something; see docs/guides/models.md"),
        ("skep events tail garden", "watch what happens in it"),
    ):
        console.print(f"     [green]$[/green] {command:<26}[dim]{purpose}[/dim]")
    console.print()


def _heading(console: Console, number: int, title: str) -> None:
    console.print(f"\n[bold cyan]{number}[/bold cyan]  [bold]{title}[/bold]")


def _done(console: Console, text: str) -> None:
    console.print(f"     [green]ok[/green]  {text}")
