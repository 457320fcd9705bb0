"""Python that lasts from one piece to the next, with its tables and pictures."""

from __future__ import annotations

from dataclasses import asdict

from skep.agent.actions import RunPython
from skep.agent.bounds import clip, keep
from skep.agent.desk import Desk
from skep.agent.observations import CellRan, Observation
from skep.agent.tool import Tool
from skep.agent.tools.printed import trouble
from skep.agent.tools.shortfall import lacking
from skep.sandbox.results import Cell, Result
from skep.sessions.computer import Computer

#: Where pictures go: artifacts are collected from there.
DISPLAY = "/workspace/output/display"
_MOST_SHOWN = 20
_SHOWN_CHARS = 4_000


async def run_python(action: RunPython, desk: Desk) -> Observation:
    computer = await desk.computer()
    context = await computer.context(desk.room)
    usual_s = desk.timeout_s(action.kind)
    cell = await context.run(action.code, key=action.stamp.key, timeout_s=action.timeout_s or usual_s)
    told = asdict(await keep(computer, action.stamp.call, cell.stdout, cell.stderr, cut=cell.truncated))
    if cell.outcome == "timeout" and action.timeout_s is None:
        return trouble(action, "tool_timeout", f"it was not done within {usual_s:g} s: {cell.note}", **told)
    missing = cell.error.message if cell.error and cell.error.name == "ModuleNotFoundError" else ""
    if (lack := lacking(action, missing, **told)) is not None:
        return lack
    error = f"{cell.error.traceback or cell.error.name}\n{cell.error.message}" if cell.error else ""
    return CellRan(
        stamp=action.stamp,
        outcome=cell.outcome,
        value=clip(cell.text, _SHOWN_CHARS),
        shown=_shown(cell),
        pictures=await _save_pictures(computer, action.stamp.call, cell.results),
        error=clip(error, _SHOWN_CHARS),
        note=_note(cell),
        **told,
    )


def _shown(cell: Cell) -> tuple[str, ...]:
    texts = [result.markdown or result.text for result in cell.results if not result.main]
    notes = [note for result in cell.results for note in result.notes]
    return tuple(clip(text, _SHOWN_CHARS) for text in (*texts, *notes) if text)[:_MOST_SHOWN]


def _note(cell: Cell) -> str:
    gone = "it ran in a fresh kernel, without the variables of earlier code" if cell.restarted else ""
    lost = "its variables are gone" if cell.state_lost else ""
    return "; ".join(note for note in (cell.note, gone, lost) if note)


async def _save_pictures(computer: Computer, call: str, results: tuple[Result, ...]) -> tuple[str, ...]:
    pictures = [
        (f"{DISPLAY}/{call}-{number}.{ending}", data)
        for number, result in enumerate(results, start=1)
        for ending, data in (("png", result.png), ("jpg", result.jpeg), ("svg", result.svg))
        if data
    ][:_MOST_SHOWN]
    if pictures:
        async with computer.files() as files:
            for path, data in pictures:
                await files.write(path, data)
    return tuple(path for path, _ in pictures)


TOOLS = (Tool(RunPython, run_python, network=True),)
