"""skep template: what workspaces start from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from skep.cli.terminal import AsJson, examples, print_json, print_line, print_table

if TYPE_CHECKING:
    from skep.workspace.template.templates import TemplateInfo, Templates

template_app = typer.Typer(help="Write templates, from which workspaces start, and check them.", no_args_is_help=True)


def open_templates() -> Templates:
    """Open the templates of this machine."""
    from skep.config import Environment
    from skep.workspace.template.templates import Templates

    return Templates(Environment.read().paths.home / "templates")


def complete_template(incomplete: str) -> list[str]:
    return [name for name in open_templates().names() if name.startswith(incomplete)]


TemplateName = Annotated[
    str,
    typer.Argument(
        help="Name of the template.", autocompletion=complete_template, metavar="TEMPLATE", show_default=False
    ),
]


@template_app.command("list", epilog=examples("skep template list", "skep template list --json | jq -r '.[].name'"))
def list_(as_json: AsJson = False) -> None:
    """List the templates: those that Skep ships, and your own, which take the place of a shipped one of their name."""
    found = open_templates().list()
    if as_json:
        print_json([_info_json(info) for info in found])
        return
    rows = [(info.name, info.extends or "", info.origin, _summary(info)) for info in found]
    print_table(("NAME", "EXTENDS", "FROM", "DESCRIPTION"), rows, empty="There are no templates.")


@template_app.command(
    epilog=examples(
        "skep template show data-science  # with all that it extends",
        "skep template show data-science --source  # the file as it is",
    )
)
def show(
    name: TemplateName,
    source: Annotated[bool, typer.Option("--source", help="Print the file as it is written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a template as it takes effect, with all that it extends."""
    from skep.workspace.template.draft import written

    templates = open_templates()
    if source:
        text = templates.source(name)
        if as_json:
            print_json({"name": name, "file": str(templates.file(name)), "source": text})
        else:
            print_line(text.removesuffix("\n"))
        return
    chain = templates.chain(name)
    if as_json:
        origin = {"chain": chain.names, "recipe_hash": chain.template.recipe_hash()}
        print_json(chain.template.model_dump(mode="json", exclude={"extends"}) | origin)
        return
    print_line(f"# {' -> '.join(chain.names)}")
    print_line(written(chain.template).removesuffix("\n"))


@template_app.command(
    epilog=examples(
        "skep template check  # all of your own",
        "skep template check garden",
        "skep template check ./garden.yaml  # a file that is elsewhere",
    )
)
def check(
    which: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names or files; all of your own if there are none.",
            autocompletion=complete_template,
            metavar="TEMPLATE",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check templates; name everything that is wrong, with its line and column. Ends with 2 if anything is."""
    templates = open_templates()
    own = [str(info.file) for info in templates.list() if info.origin == "own"]
    files = [templates.locate(one) for one in which or own]
    found = [(str(file), templates.check(file)) for file in files]
    if as_json:
        print_json([{"file": file, "ok": not problems, "problems": _json(problems)} for file, problems in found])
    elif not found:
        print_line(f"{templates.folder} holds no templates")
    else:
        for file, problems in found:
            for line in [f"{file}:{problem}" for problem in problems] or [f"{file}: ok"]:
                print_line(line)
    raise typer.Exit(2 if any(problems for _, problems in found) else 0)


@template_app.command(
    epilog=examples(
        "skep template new garden",
        "skep template new garden --extends default  # add to another",
        "$EDITOR $(skep template new garden)  # write it, and change it at once",
    )
)
def new(
    name: Annotated[str, typer.Argument(help="Name of the new template.", metavar="TEMPLATE", show_default=False)],
    extends: Annotated[
        str | None,
        typer.Option(
            "--extends",
            help="Add to this template.",
            autocompletion=complete_template,
            metavar="TEMPLATE",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a template with comments that say what can be changed, and print where it is."""
    file = open_templates().new(name, base=extends)
    if as_json:
        print_json({"name": name, "file": str(file)})
    else:
        print_line(str(file))


def _summary(info: TemplateInfo) -> str:
    if info.problems:
        return f"cannot be used; see: skep template check {info.name}"
    return info.description.strip().partition("\n")[0]


def _info_json(info: TemplateInfo) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(info) | {"file": str(info.file), "ok": not info.problems}


def _json(problems: list[Any]) -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [asdict(problem) for problem in problems]
