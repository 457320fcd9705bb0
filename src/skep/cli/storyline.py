"""A task as it happens, a line for each thing that is worth one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skep.cli.terminal import console, printable
from skep.state.events import (
    Answered,
    Asked,
    CancelAsked,
    Classified,
    FailureNoted,
    Healed,
    LoopWarned,
    ModelCalled,
    Noted,
    Observed,
    Planned,
    Proposed,
    Reflected,
    Ruled,
    TaskStarted,
)

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console
    from rich.status import Status

    from skep.state.events import Recorded
    from skep.tasks.task import Task

_WIDEST = 100
_KINDS = {"reply": "a simple reply", "one": "one task", "many": "several tasks"}
#: Which argument of an action says the most about it, and what goes before it.
_GIST = {
    "run_command": ("$ ", "command"),
    "poll_command": ("wait for ", "job"),
    "stop_command": ("stop ", "job"),
    "run_python": ("python: ", "code"),
    "read_file": ("read ", "path"),
    "edit_file": ("edit ", "path"),
    "list_files": ("list ", "path"),
    "expose_port": ("expose port ", "port"),
    "use_skill": ("skill ", "skill"),
    "ask_user": ("ask: ", "question"),
}
_STYLES = {"ok": "green", "bad": "red", "healing": "yellow", "plain": "dim"}


def act(action: dict[str, Any]) -> str:
    """Say on one line what an act is."""
    kind = str(action.get("kind", "act"))
    if kind == "browse":
        target = action.get("url") or action.get("selector") or ""
        return clip(f"browser: {action.get('act', '')} {target}".rstrip())
    if kind == "run_tests":
        return clip("tests: " + (action.get("command") or " ".join(action.get("paths") or ()) or "all"))
    if kind == "install_packages":
        return clip(f"install {action.get('ecosystem', '')} packages: {' '.join(action.get('names') or ())}")
    if kind == "write_file":
        return clip(f"write {action.get('path', '')}: {action.get('content', '')}")
    before, field = _GIST.get(kind, (f"{kind} ", ""))
    after = f" {action['script']}" if kind == "use_skill" and action.get("script") else ""
    return clip(f"{before}{action.get(field, '')}{after}".rstrip())


def outcome(observation: dict[str, Any]) -> tuple[str, bool]:  # noqa: PLR0912  one branch per kind
    """Say in a few words what came of an act, and whether that is well."""
    match observation.get("kind"):
        case "command_ended" | "tests_ran" | "skill_ran":
            return _ended(observation)
        case "command_polled":
            code = observation.get("exit_code")
            return ("still runs", True) if observation.get("running") else (f"exit {code}", code == 0)
        case "command_started":
            return f"runs as {observation.get('job')}", True
        case "cell_ran":
            return str(observation.get("outcome")), observation.get("outcome") == "ok"
        case "file_read" if observation.get("picture"):
            return "a picture", True
        case "packages_installed":
            versions = (observation.get("versions") or {}).items()
            return clip(", ".join(" ".join(one) for one in versions) or str(observation.get("note"))), True
        case "file_read":
            read = len(str(observation.get("text")).splitlines())
            return "1 line" if read == 1 else f"{read:,} lines", True
        case "file_written":
            return f"{observation.get('size'):,} bytes", True
        case "file_edited":
            return f"{observation.get('replaced')} replaced", True
        case "listed":
            return f"{len(observation.get('entries') or ())} entries", True
        case "port_exposed":
            return str(observation.get("link")), True
        case "page_seen":
            return clip(f"{observation.get('status') or ''} {observation.get('title') or ''}".strip() or "seen"), True
        case "answered":
            return (clip(str(observation.get("answer"))), True) if observation.get("answered") else ("no answer", False)
        case "refused":
            return clip(f"not allowed: {observation.get('why')}"), False
        case "trouble":
            return clip(f"{observation.get('failure')}: {observation.get('message')}"), False
        case "interrupted":
            return clip(f"interrupted: {observation.get('note')}"), False
        case _:
            return "done", True


def _ended(observation: dict[str, Any]) -> tuple[str, bool]:
    code = observation.get("exit_code")
    said = [f"exit {code}"]
    counted = [f"{observation[name]} {name}" for name in ("passed", "failed", "errors") if observation.get(name)]
    said += counted
    if observation.get("status") is not None:
        said.append(f"status {observation['status']}")
    if observation.get("timed_out"):
        said.append("out of time")
    if observation.get("limit"):
        said.append(f"ended by the limit on {observation['limit']}")
    return ", ".join(said), code == 0


def clip(text: str) -> str:
    """Return the text as one line that fits."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"


class Story:
    """Tells what happens in a task: on stderr unless told otherwise, so that stdout is the reply's alone."""

    def __init__(self, task: Task, screen: Console | None = None, *, indent: int = 2) -> None:
        self._task = task
        self._titles: dict[str, str] = {}
        self._acts: dict[tuple[str | None, str], tuple[str, datetime]] = {}
        self._console = screen or console(stderr=True)
        self._indent = " " * indent
        self._status: Status | None = None

    def tell(self, recorded: Recorded) -> None:
        """Print the line of an event, if it is worth one."""
        call = (recorded.task_id, getattr(recorded.event, "call", ""))
        match recorded.event:
            case TaskStarted(start=start) if start > 1:
                self.say(f"taken up again by another worker, start {start}", "healing", recorded)
            case Classified(kind=kind, why=why):
                self.say(f"{_KINDS[kind]}: {why}", "plain", recorded)
            case Planned(tasks=tasks):
                self._plan(recorded, tasks)
            case Proposed(action=action) if action.get("kind") not in ("finish", "ask_user"):
                self._acts[call] = act(action), recorded.at
                self._show(self._acts[call][0])
            case Ruled(ruling="deny", why=why):
                self.say(f"denied: {why}", "bad", recorded)
            case Observed(observation=observation) if call in self._acts:
                self._observed(recorded, call, observation)
            case Asked(kind=kind, question=question, choices=choices):
                what = "asks" if kind == "question" else "asks whether it may"
                offered = f" ({', '.join(choices)})" if choices else ""
                self.say(f"{what}: {question}{offered}", "healing", recorded, whole=True)
            case Answered(answer=answer):
                self.say(f"answered: {answer}", "plain", recorded)
            case event:
                self._healing(recorded, event)

    def _healing(self, recorded: Recorded, event: object) -> None:
        match event:
            case LoopWarned(pattern=pattern, guidance=guidance):
                self.say(f"goes round in circles ({pattern}): {guidance}", "healing", recorded)
            case Healed(failure=failure, tier=tier, remedy=remedy, detail=detail):
                self.say(f"healing, tier {tier}: {failure} -> {remedy}: {detail}", "healing", recorded)
            case Reflected(note=note, check=check):
                what = check.partition("\n")[0] or "what happened"
                self.say(f"reflected on {clip(what)}: {note}", "healing", recorded, whole=True)
            case FailureNoted(root_cause=cause):
                self.say(f"noted for later: {cause}", "bad", recorded)
            case CancelAsked(why=why):
                self.say(f"is being cancelled: {why}" if why else "is being cancelled", "bad", recorded)
            case Noted(text=text):
                self.say(text, "plain", recorded)
            case ModelCalled(passed_over=passed, provider=provider, model=model) if passed:
                self.say(f"{', '.join(passed)}; {provider}/{model} answers", "healing", recorded)

    def _plan(self, recorded: Recorded, tasks: tuple[dict[str, Any], ...]) -> None:
        self._titles |= {str(one.get("id")): str(one.get("title")) for one in tasks}
        for number, one in enumerate(tasks, 1):
            after = [self._titles.get(str(name), str(name)) for name in one.get("after") or ()]
            self.say(
                f"{number}. {one.get('title')}" + (f" (after {', '.join(after)})" if after else ""), "plain", recorded
            )

    def _observed(self, recorded: Recorded, call: tuple[str | None, str], observation: dict[str, Any]) -> None:
        what, began = self._acts.pop(call)
        result, well = outcome(observation)
        took = (recorded.at - began).total_seconds()
        self.say(f"{what} -> {result} ({took:.1f} s)", "ok" if well else "bad", recorded, whole=True)

    def say(self, text: str, style: str, recorded: Recorded | None = None, *, whole: bool = False) -> None:
        """Print one line; that of a part of the work says of which."""
        from rich.padding import Padding
        from rich.text import Text

        self.hush()
        part = "" if recorded is None else self._titles.get(recorded.task_id or "", "")
        line = f"[{clip(part)}] {text}" if part else text
        shown = " ".join(line.split()) if whole else clip(line)
        told = Text(printable(shown), _STYLES[style])
        if self._console.is_terminal:  # elsewhere a line stays one, for whoever reads it with a program
            self._console.print(Padding(told, (0, 0, 0, len(self._indent))))
        else:
            self._console.print(Text(self._indent) + told, soft_wrap=True)

    def _show(self, what: str) -> None:
        """Show on a terminal what runs now."""
        if not self._console.is_terminal:
            return
        self.hush()
        line = printable(what)[: self._console.width - 4]  # what goes on in a second line stays there
        self._status = self._console.status(line.replace("[", "\\["), spinner="dots")
        self._status.start()

    def hush(self) -> None:
        """Take away what shows that something runs."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def spent(task: Task) -> str:
    """Say what a task took: time, tokens and money, and whether a model was asked at all."""
    said = []
    if task.started_at is not None and task.ended_at is not None:
        said.append(f"{(task.ended_at - task.started_at).total_seconds():.1f} s")
    said.append(f"{task.tokens:,} tokens")
    if task.scripted:
        said.append("scripted: no model was asked")
    else:
        said.append(f"${task.usd:.4f}")
    if task.unpriced:
        said.append(f"{task.unpriced} calls of unknown price")
    return ", ".join(said)
