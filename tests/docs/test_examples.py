"""What the documents show is what happens: examples run, links lead somewhere.

In README.md and docs/guides, blocks marked `console` hold commands after `$ ` and their output, in which … stands
for anything; they run one after the other in an empty home, the first of README.md as a program of its own and the
others as forks of one that is loaded. Blocks marked `python` run. Blocks marked `json config` are valid settings. In
blocks marked `sh` each skep command must exist with its options.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from skep.cli.app import app
from skep.config import Settings
from skep.config.file import judge

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", *GUIDES]
EVERYTHING = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```(\w+[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(document: Path, kind: str) -> list[str]:
    return [text for name, text in _BLOCK.findall(document.read_text()) if name.strip() == kind]


def showing(kind: str) -> list[Path]:
    """Return the documents with blocks of a kind."""
    return [document for document in DOCUMENTS if blocks(document, kind)]


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def commands(document: Path) -> Iterator[tuple[str, str]]:
    """Yield each command of the console blocks with the output that is shown for it."""
    for block in blocks(document, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def environment(home: Path, scripts: Path = SCRIPTS) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "PYTHONPATH") if name in os.environ}
    return {**kept, "HOME": str(home), "PATH": f"{scripts}:{SCRIPTS}:/usr/local/bin:/usr/bin:/bin"}


@pytest.mark.parametrize("document", showing("console"), ids=name_of)
def test_console_examples_print_what_they_say(document: Path, tmp_path: Path, warm_scripts: Path) -> None:
    alone = document.name == "README.md"
    for number, (command, shown) in enumerate(commands(document)):
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment(tmp_path, SCRIPTS if alone and number == 0 else warm_scripts),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0, f"$ {command}\n{ran.stdout}"
        pattern = ".*".join(map(re.escape, shown.split("…")))
        assert re.fullmatch(pattern, ran.stdout, re.DOTALL), f"$ {command}\n{ran.stdout}\nis not\n{shown}"


@pytest.mark.parametrize("document", showing("python"), ids=name_of)
def test_python_examples_run(document: Path, tmp_path: Path) -> None:
    for block in blocks(document, "python"):
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", block],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0, f"{block}\n{ran.stderr}"


@pytest.mark.parametrize("document", showing("json config"), ids=name_of)
def test_settings_in_examples_are_valid(document: Path) -> None:
    for block in blocks(document, "json config"):
        assert isinstance(judge(block.encode()), Settings), judge(block.encode())


def skep_commands(text: str) -> Iterator[list[str]]:
    """Find the skep commands in lines of shell, as words; pipes, redirections and brackets end a command."""
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for token in [*lexer, ";"]:
            if not set(token) <= set("();<>|&"):
                words.append(token)
                continue
            if words and words[0] == "skep":
                yield words[1:]
            words = []


@cache
def whole() -> Any:
    """Return the tree of all commands."""
    return typer.main.get_command(app)


def check_words(words: list[str]) -> None:
    """Follow the words down the tree of commands and parse the rest as the command would."""
    command = whole()
    context = command.make_context("skep", [], resilient_parsing=True)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        words = words[1:]
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
    assert not (words and getattr(command, "commands", {}) and not words[0].startswith("-")), f"no command {words}"
    context.resilient_parsing = False  # from here on an unknown option is an error
    command.make_parser(context).parse_args(args=list(words))


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "docs/reference/commands.md"], ids=name_of)
def test_each_skep_command_shown_exists_with_its_options(document: Path) -> None:
    for block in blocks(document, "sh"):
        for words in skep_commands(block):
            check_words(words)


@pytest.mark.parametrize("words", [["hive", "crate"], ["hive", "list", "--no-such-option"], ["nothing"]])
def test_a_command_that_does_not_exist_would_be_noticed(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"no command|[Nn]o such option"):
        check_words(words)


@pytest.mark.parametrize("document", EVERYTHING, ids=name_of)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in _LINK.findall(document.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (document.parent / target).exists(), f"{name_of(document)}: {target}"
