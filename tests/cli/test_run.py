"""Whatever happens, a command ends with a message that helps and the exit code of its kind of error."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from skep import __version__, errors
from skep.cli.app import app
from skep.cli.terminal import printable

Ran = subprocess.CompletedProcess[str]
Cli = Callable[..., Ran]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make a command `skep fail` that raises."""

    def plant(error: BaseException) -> None:
        def fail(as_json: bool = typer.Option(False, "--json")) -> None:
            raise error

        monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
        app.command("fail")(fail)

    return plant


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotFound("no hive garden"), 2),
        (errors.Denied("not yours"), 3),
        (errors.StorageFull("no room"), 4),
        (errors.DatabaseBusy("held"), 5),
        (errors.ChainBroken("record 3"), 6),
        (errors.Defect("a bug"), 70),
        (ZeroDivisionError("division by zero"), 70),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    cli: Cli, failing: Callable[[BaseException], None], error: Exception, code: int
) -> None:
    failing(error)
    ran = cli("fail")
    assert ran.returncode == code
    assert ran.stdout == ""
    assert ran.stderr.startswith("error: ")
    assert "Traceback" not in ran.stderr


def test_an_error_is_one_line_and_its_hint_another(cli: Cli, failing: Callable[[BaseException], None]) -> None:
    failing(errors.NotFound("no hive garden", hint="skep hive list"))
    assert cli("fail").stderr == "error: no hive garden\n  try: skep hive list\n"


def test_with_json_the_error_is_a_json_object(cli: Cli, failing: Callable[[BaseException], None]) -> None:
    failing(errors.NotFound("no hive garden", hint="skep hive list"))
    assert json.loads(cli("fail", "--json").stderr) == {
        "error": {"type": "NotFound", "message": "no hive garden", "hint": "skep hive list", "exit_code": 2}
    }


def test_debug_shows_the_traceback_wherever_the_word_stands(cli: Cli, failing: Callable[[BaseException], None]) -> None:
    failing(ValueError("boom"))
    assert "Traceback" in cli("fail", "--debug").stderr
    assert "Traceback" in cli("--debug", "fail").stderr


def test_what_stands_after_two_dashes_is_left_alone(cli: Cli) -> None:
    ran = cli("hive", "create", "--", "--debug")
    assert ran.stderr.startswith("error: hive name is not a valid name: '--debug'")


def test_an_unexpected_error_asks_for_debug(cli: Cli, failing: Callable[[BaseException], None]) -> None:
    failing(ValueError("boom"))
    ran = cli("fail")
    assert "ValueError: boom" in ran.stderr
    assert "--debug" in ran.stderr


def test_an_error_never_shows_a_secret(
    cli: Cli, failing: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISTRAL_API_KEY", "known by its value")
    failing(ValueError("postgresql://me:hunter22@host, sk-ant-REDACTED, known by its value"))
    for words in (("fail",), ("fail", "--debug"), ("fail", "--json")):
        ran = cli(*words)
        assert "hunter22" not in ran.stderr
        assert "sk-ant" not in ran.stderr
        assert "known by its value" not in ran.stderr


def test_ctrl_c_ends_silently_with_130(cli: Cli, failing: Callable[[BaseException], None]) -> None:
    failing(KeyboardInterrupt())
    ran = cli("fail")
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_a_message_cannot_play_tricks_on_the_terminal() -> None:
    assert printable("a\x1b[31mb\u202ec\nd\x00") == "a\\x1b[31mb\\u202ec\nd\\x00"


def test_a_mistyped_command_is_answered_with_the_likely_one(cli: Cli) -> None:
    ran = cli("hive", "creat")
    assert ran.returncode == 2
    assert "Did you mean 'create'?" in ran.stderr
    assert ran.stderr.endswith("  try: skep hive --help\n")


def test_skep_alone_prints_the_help_with_examples(cli: Cli) -> None:
    ran = cli()
    assert ran.returncode == 0
    assert "$ skep demo" in ran.stdout


def test_a_group_alone_prints_its_help(cli: Cli) -> None:
    ran = cli("hive")
    assert "create" in ran.stdout + ran.stderr


def test_every_command_teaches_by_example() -> None:
    groups = [(group.name, group.typer_instance) for group in app.registered_groups]
    assert groups
    for name, group in groups:
        assert group is not None
        for command in group.registered_commands:
            assert command.epilog and f"$ skep {name} " in command.epilog, f"skep {name} {command.name}"


def test_the_version_comes_without_importing_anything_heavy(home: Path) -> None:
    code = (
        "import sys; sys.argv = ['skep', '--version']; import skep.cli; skep.cli.main();"
        "heavy = {'typer', 'rich', 'pydantic', 'sqlalchemy', 'structlog', 'cryptography', 'asyncio'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout, ran.stderr) == (f"skep {__version__}\n", "")


def test_help_comes_without_importing_the_database(home: Path) -> None:
    code = (
        "import sys; from skep.cli.run import run; run(['hive', '--help']);"
        "heavy = {'sqlalchemy', 'structlog', 'cryptography', 'fastapi', 'uvicorn', 'dbos', 'pydantic_ai', 'httpx'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stderr == ""


def test_importing_skep_imports_nothing_but_the_standard_library() -> None:
    code = "import sys; before = set(sys.modules); import skep; print(*(set(sys.modules) - before))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert {name.partition(".")[0] for name in ran.stdout.split()} <= {"skep", *sys.stdlib_module_names}


def test_the_installed_script_runs() -> None:
    script = Path(sys.executable).with_name("skep")
    if not script.exists():
        pytest.skip("skep is not installed in this environment; scripts/test installs it")
    ran = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"skep {__version__}\n")


def test_a_closed_pipe_is_not_an_error(home: Path) -> None:
    """A reader such as `head` may leave before all is written."""
    bash = shutil.which("bash")
    assert bash is not None
    script = f"set -o pipefail; {sys.executable} -m skep config schema | head -n 1"
    ran = subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "{\n", "")


def test_a_terminal_that_knows_only_ascii_gets_escapes(program: Cli, config: Path) -> None:
    config.write_text("[]")
    ran = program("config", "check", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert (ran.returncode, "one JSON object, { \\u2026 }" in ran.stderr) == (2, True)


def test_a_full_disk_under_stdout_is_named(home: Path) -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "skep", "config", "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ran.returncode == errors.StorageFull.exit_code
    assert "no room left" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_real_ctrl_c_ends_a_tail_silently(program: Cli, home: Path) -> None:
    assert program("hive", "create", "garden").returncode == 0
    tail = subprocess.Popen(
        [sys.executable, "-m", "skep", "events", "tail", "garden"],
        env=os.environ.copy(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tail.stdout is not None
    assert "hive_created" in tail.stdout.readline()
    tail.send_signal(signal.SIGINT)
    out, err = tail.communicate(timeout=30)
    assert (tail.returncode, out, err) == (130, "", "")


def test_completion_offers_commands_and_flags(program: Cli) -> None:
    completed = program(
        _SKEP_COMPLETE="complete_bash", _TYPER_COMPLETE_ARGS="skep hive se", COMP_WORDS="skep hive se", COMP_CWORD="2"
    )
    assert completed.stdout.split() == ["set"]
