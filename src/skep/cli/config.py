"""skep config: the settings in effect, and what is wrong with them."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from skep.cli.terminal import AsJson, examples, print_fields, print_json, print_line

if TYPE_CHECKING:
    from skep.config import Paths

app = typer.Typer(help="Look at the settings and check them.", no_args_is_help=True)


@app.command(epilog=examples("skep config path  # where the file is", "$EDITOR $(skep config path)  # change it"))
def path(as_json: AsJson = False) -> None:
    """Print where config.json is read from."""
    from skep.config import Environment

    paths = Environment.read().paths
    if as_json:
        print_json({"config": str(paths.config), "home": str(paths.home), "log": str(paths.log_file)})
    else:
        print_line(str(paths.config))


@app.command(epilog=examples("skep config show", "skep config show --json | jq .sandbox.limits"))
def show(as_json: AsJson = False) -> None:
    """Print the settings in effect, defaults included. Secrets are never printed."""
    from skep.config import Environment, load
    from skep.config.secrets import mask_url

    paths = Environment.read().paths
    settings = load(paths)
    shown = settings.model_dump(mode="json", by_alias=True)
    shown["state_url"] = mask_url(settings.state_url or paths.default_state_url)
    if as_json:
        print_json(shown)
    else:
        print_fields({name: value for name, value in _flat("", shown) if name != "$schema"})


@app.command(
    epilog=examples("skep config check", "skep config check --watch  # check again whenever the file is saved")
)
def check(
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep watching, and say after each change what it does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check config.json; name each wrong field with its line and column."""
    from skep.config import Environment, load
    from skep.config.file import judge, read
    from skep.config.problem import Problem

    paths = Environment.read().paths
    if as_json:
        content = read(paths.config)
        judged = judge(content) if content is not None else load(paths)
        found: list[Problem] = judged if isinstance(judged, list) else []
        print_json({"file": str(paths.config), "ok": not found, "problems": [_as_json(one) for one in found]})
        raise typer.Exit(2 if found else 0)
    if watch:
        asyncio.run(_watch(paths))
    load(paths)
    exists = paths.config.exists()
    print_line(f"{paths.config}: ok" if exists else f"{paths.config} does not exist; the defaults apply")


@app.command(epilog=examples("skep config schema > config.schema.json"))
def schema() -> None:
    """Print the JSON Schema of config.json, for editors."""
    import json

    from skep.config.settings import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


async def _watch(paths: Paths) -> None:
    from skep.config import Change, ConfigWatch, load
    from skep.errors import ConfigInvalid

    def applied(change: Change) -> None:
        restart = f" (at the next start: {', '.join(change.needs_restart)})" if change.needs_restart else ""
        _say(f"applied: {', '.join(change.changed)}{restart}")

    def refused(error: ConfigInvalid) -> None:
        _say(f"refused, the old settings stay: {error.message}")

    watch = ConfigWatch(paths, load(paths), applied=applied, refused=refused)
    _say(f"watching {paths.config}, Ctrl-C ends it")
    await watch.run()


def _say(text: str) -> None:
    print_line(text)
    sys.stdout.flush()


def _as_json(problem: object) -> dict[str, object]:
    from dataclasses import asdict

    from skep.config.problem import Problem

    return asdict(problem) if isinstance(problem, Problem) else {}


def _flat(prefix: str, value: object) -> list[tuple[str, str]]:
    """Spell nested settings as dotted names with their values."""
    if isinstance(value, dict) and value:
        return [pair for name, inner in value.items() for pair in _flat(f"{prefix}.{name}".lstrip("."), inner)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [pair for index, inner in enumerate(value) for pair in _flat(f"{prefix}[{index}]", inner)]
    if isinstance(value, list | dict):
        return [(prefix, ", ".join(map(str, value)) or "none")]
    return [(prefix, str(value).lower() if value is None or isinstance(value, bool) else str(value))]
