"""skep python shows what a cell gives as a person wants to see it, and keeps contexts between calls when asked."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skep.cli.cellview import show_result
from skep.sandbox.results import Column, Result, Table

Ran = subprocess.CompletedProcess[str]
Cli = Callable[..., Ran]

PNG = b"\x89PNG\r\n\x1a\n"
TABLE = Table((Column("name", "str"), Column("kg", "float64")), (("roof", 1.5), ("gar\x1bden", None)), 2, 2)


def test_a_cell_prints_its_output_and_its_value(cli: Cli) -> None:
    ran = cli("python", "-c", "import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "out\n42\n", "err\n")


def test_code_comes_from_a_file_or_a_pipe(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cell.py").write_text("'from a file'")
    assert cli("python", str(tmp_path / "cell.py")).stdout == "'from a file'\n"
    with (tmp_path / "cell.py").open() as piped:
        monkeypatch.setattr("sys.stdin", piped)
        assert cli("python", "-").stdout == "'from a file'\n"


def test_an_error_shows_its_traceback_and_ends_with_one(cli: Cli) -> None:
    ran = cli("python", "-c", "1 / 0")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "python_kernel" not in ran.stderr


def test_a_cell_out_of_time_ends_with_124_and_says_so(cli: Cli) -> None:
    ran = cli("python", "-c", "while True: pass", "--timeout", "0.3")
    assert ran.returncode == 124
    assert "The time of 0.3 s was up" in ran.stderr


def test_a_dead_kernel_ends_with_its_code_and_says_so(cli: Cli) -> None:
    ran = cli("python", "-c", "import os; os._exit(9)")
    assert ran.returncode == 9
    assert "the kernel ended with code 9" in ran.stderr


def test_pictures_are_saved_under_names_of_their_own(cli: Cli, tmp_path: Path) -> None:
    code = "class P:\n    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n'\ndisplay(P())\nP()"
    ran = cli("python", "-c", code, "--pictures", str(tmp_path / "out"))
    first, second = tmp_path / "out" / "cell-1-1.png", tmp_path / "out" / "cell-1-2.png"
    assert ran.stdout == f"picture: {first}\npicture: {second}\n"
    assert first.read_bytes() == second.read_bytes() == PNG


def test_json_holds_everything_about_the_cell(cli: Cli) -> None:
    ran = cli("python", "-c", "print('x')\n{'a': [1]}", "--json")
    cell = json.loads(ran.stdout)
    assert (cell["outcome"], cell["stdout"], cell["results"][0]["json"]) == ("ok", "x\n", {"a": [1]})
    failed = cli("python", "-c", "1 / 0", "--json")
    assert (failed.returncode, json.loads(failed.stdout)["error"]["name"]) == (1, "ZeroDivisionError")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-c", "1", "file.py"), "only one of them can run"),
        (("no-such-file.py",), "cannot read 'no-such-file.py'"),
        (("--context", "../up", "-c", "1"), "cannot name a context"),
    ],
)
def test_a_wrong_request_is_explained(cli: Cli, words: tuple[str, ...], said: str) -> None:
    ran = cli("python", *words)
    assert ran.returncode == 2
    assert said in ran.stderr


def test_a_table_in_a_pipe_is_tab_separated_and_harmless(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    show_result(Result(text="repr", data=TABLE), cell=1, pictures=tmp_path)
    assert capsys.readouterr().out == "name\tkg\nroof\t1.5\ngar\\x1bden\t-\n"


def test_a_table_on_a_terminal_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    show_result(Result(text="repr", data=TABLE), cell=1, pictures=tmp_path)
    drawn = capsys.readouterr().out
    assert re.search(r"name +┃ +kg", drawn)
    assert "gar\\x1bden" in drawn
    assert "2 rows x 2 columns" in drawn


@pytest.fixture
def kept(program: Cli) -> Iterator[Cli]:
    """Run cells in a kept context, which is ended afterwards."""
    yield lambda *words: program("python", "--context", "bees", *words)
    assert program("python", "--context", "bees", "--end").returncode == 0


def test_a_context_keeps_its_variables_for_the_next_call(kept: Cli, program: Cli) -> None:
    assert kept("-c", "x = 41").returncode == 0
    assert kept("-c", "x + 1").stdout == "42\n"
    assert program("python", "--contexts").stdout == "bees\tpython\tidle\t2\n"
    assert kept("--end").returncode == 0
    assert program("python", "--contexts").stdout == ""
    assert "NameError" in kept("-c", "x").stderr


def test_a_context_whose_keeper_died_says_that_its_variables_are_gone(kept: Cli, home: Path) -> None:
    keeper = int(kept("-c", "x = 1", "--json").returncode == 0 and keeper_pid(home))
    os.kill(keeper, 9)
    ran = kept("-c", "'x' in globals()")
    assert ran.stdout == "False\n"
    assert "variables of earlier cells are gone" in ran.stderr


def keeper_pid(home: Path) -> int:
    """Find the process that holds the lock of the contexts."""
    lock = (home / ".local/share/skep/contexts/none/lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[5].rpartition(":")[2] == str(lock):
            return int(fields[4])
    raise AssertionError("nobody keeps contexts")


# Ctrl-C reaches a program only from the terminal of its own session.
_AT_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.executable, [sys.executable, '-m', 'skep', *sys.argv[1:]])"
)


class Person:
    """Types at a terminal on which skep runs, and reads what it shows."""

    def __init__(self, *words: str) -> None:
        self._terminal, theirs = pty.openpty()
        self._program = subprocess.Popen(
            [sys.executable, "-c", _AT_TERMINAL, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until a text is on the screen; what came before it is not looked at again."""
        deadline = time.monotonic() + 30
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.seen!r}"
            if select.select([self._terminal], [], [], 0.2)[0]:
                self.seen += os.read(self._terminal, 4096).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def leave(self) -> int:
        self.type("\x04")
        code = self._program.wait(30)
        os.close(self._terminal)
        return code


def test_at_a_terminal_cells_follow_each_other_and_ctrl_c_breaks_into_one(home: Path) -> None:
    person = Person("python")
    person.wait_for("[1] ")
    person.type("def twice(n):\n    return 2 * n\n\n")
    person.wait_for("[2] ")
    person.type("print('started'); import time; time.sleep(60)\n")
    person.wait_for("\r\nstarted")
    person.type("\x03")
    person.wait_for("interrupted")
    person.wait_for("[3] ")
    person.type("twice(21)\n")
    person.wait_for("\r\n42")
    person.wait_for("[4] ")
    assert person.leave() == 0
