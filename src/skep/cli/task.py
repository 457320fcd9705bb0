"""skep task: look at tasks, end them, answer them, and run them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.ask import HiveOption, Unfollowed, carry, with_tasks
from skep.cli.desk import DEFAULT_ACCOUNT, Account, check_statuses
from skep.cli.terminal import AsJson, examples, print_fields, print_json, print_line, print_table

if TYPE_CHECKING:
    from datetime import datetime

    from skep.app.carrier import Carrier
    from skep.tasks.task import Step, Task

app = typer.Typer(help="Look at tasks, end them, answer them, and run them again.", no_args_is_help=True)

TaskId = Annotated[str, typer.Argument(help="Id of the task.", metavar="TASK", show_default=False)]


@app.command(
    "list",
    epilog=examples(
        "skep task list",
        "skep task list --hive garden --status running --status asking",
        "skep task list --json | jq -r '.[].id'",
    ),
)
def list_(
    hive: HiveOption = None,
    statuses: Annotated[
        list[str] | None,
        typer.Option("--status", help="Only those in this status; may be repeated.", metavar="STATUS"),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=500, help="How many at most.")] = 50,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """List tasks, the newest first."""
    from skep.tasks.task import STATUSES

    wanted = check_statuses(statuses or [], STATUSES)

    async def work(carrier: Carrier) -> tuple[Task, ...]:
        return await carrier.list(hive=hive, statuses=wanted, limit=limit)

    found = with_tasks(account, work)
    if as_json:
        print_json([task.as_json() for task in found])
        return
    rows = [(task.id, task.status, f"{task.created_at:%Y-%m-%d %H:%M:%S}", _said(task)) for task in found]
    print_table(
        ("ID", "STATUS", "CREATED (UTC)", "PROMPT"),
        rows,
        empty="There are no tasks. Ask for something: skep run 'Hello'",
    )


def _said(task: Task) -> str:
    from skep.cli.storyline import clip

    return clip(task.title or task.prompt)


@app.command(epilog=examples("skep task show TASK", "skep task show TASK --json | jq -r .reply"))
def show(task: TaskId, account: Account = DEFAULT_ACCOUNT, as_json: AsJson = False) -> None:
    """Show a task: how it stands, its reply, what it cost, and the steps that it took."""

    async def work(carrier: Carrier) -> tuple[Task, tuple[Step, ...]]:
        return await carrier.show(task), await carrier.steps(task)

    found, steps = with_tasks(account, work)
    if as_json:
        print_json({**found.as_json(), "steps": [step.as_json() for step in steps]})
        return
    print_fields(_fields(found))
    print_line("")
    rows = [(str(step.number), f"{step.at:%H:%M:%S}", step.kind, step.status, step.what) for step in steps]
    print_table(("STEP", "AT (UTC)", "KIND", "STATUS", "WHAT"), rows, empty="It has taken no step yet.")


def _fields(task: Task) -> dict[str, str]:
    from skep.cli.storyline import spent

    def told(at: datetime | None) -> str:
        return f"{at:%Y-%m-%d %H:%M:%S} UTC" if at else "not yet"

    fields = {
        "id": task.id,
        "hive": task.hive_id,
        "thread": task.thread,
        "status": task.status + (", in part" if task.partial else ""),
        "created": told(task.created_at),
        "started": told(task.started_at),
        "ended": told(task.ended_at),
        "attempts": str(task.attempt),
        "spent": spent(task),
        "prompt": task.prompt,
    }
    more = {
        "part of": task.root if task.root != task.id else None,
        "forked from": f"{task.origin} after step {task.step}" if task.origin else None,
        "trouble": task.error,
        "sure": None if task.confidence is None else f"{task.confidence:.0%}",
        "reply": task.reply,
    }
    return fields | {name: value for name, value in more.items() if value is not None}


@app.command(epilog=examples("skep task follow TASK", "skep task follow TASK --json"))
def follow(task: TaskId, account: Account = DEFAULT_ACCOUNT, as_json: AsJson = False) -> None:
    """Watch a task from its beginning until it ends, as skep run does. Ctrl-C ends the task."""
    carry(account, lambda carrier: carrier.show(task), follow=True, as_json=as_json)


@app.command(epilog=examples("skep task cancel TASK", "skep task cancel TASK --why 'the wrong file'"))
def cancel(
    task: TaskId,
    why: Annotated[str, typer.Option("--why", help="The reason, for the record.", metavar="TEXT")] = "",
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """End a task at once, with whatever it runs."""

    async def work(carrier: Carrier) -> Task:
        return await carrier.cancel(task, why=why)

    _print(with_tasks(account, work), as_json=as_json)


@app.command(epilog=examples("skep task retry TASK", "skep task retry TASK --no-follow"))
def retry(
    task: TaskId, no_follow: Unfollowed = False, account: Account = DEFAULT_ACCOUNT, as_json: AsJson = False
) -> None:
    """Try a task that has ended anew, from the beginning, as another task."""
    carry(account, lambda carrier: carrier.retry(task), follow=not no_follow, as_json=as_json)


@app.command(epilog=examples("skep task show TASK  # which steps there are", "skep task fork TASK --step 3"))
def fork(
    task: TaskId,
    step: Annotated[int, typer.Option("--step", "-s", min=0, help="The last step to take over.", show_default=False)],
    no_follow: Unfollowed = False,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Run a task that has ended again from a step, as another task that takes over what came before."""
    carry(account, lambda carrier: carrier.fork(task, step), follow=not no_follow, as_json=as_json)


@app.command(epilog=examples("skep task answer TASK yes", "skep task answer TASK 'the blue one'"))
def answer(
    task: TaskId,
    text: Annotated[str, typer.Argument(help="The answer; for an approval, yes or no.", metavar="TEXT")],
    call: Annotated[
        str | None, typer.Option("--call", help="Which question, where there are several.", show_default=False)
    ] = None,
    account: Account = DEFAULT_ACCOUNT,
    as_json: AsJson = False,
) -> None:
    """Answer what a task asks."""

    async def work(carrier: Carrier) -> Task:
        return await carrier.answer(task, text, call=call)

    _print(with_tasks(account, work), as_json=as_json)


def _print(task: Task, *, as_json: bool) -> None:
    if as_json:
        print_json(task.as_json())
    else:
        print_line(f"{task.id} is {task.status}")
