"""Lines that are not Python: `!command`, `lines = !command`, `%magic` and `%%magic`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_LINE = re.compile(r"(?P<indent>\s*)(?:(?P<name>[A-Za-z_]\w*)\s*=\s*)?(?P<mark>[!%])(?P<rest>.*)", re.DOTALL)
_NAMED = re.compile(r"\{([A-Za-z_]\w*)\}")
#: A cell with more of them is refused: each costs one look at the whole cell.
_MOST = 500


class UnknownMagic(Exception):
    """A line asks for a magic that there is not."""


class CommandFailed(Exception):
    """A command that the cell depends on did not succeed."""


def translate(source: str) -> str:
    """Return the cell as Python: a line that is no Python but reads as a magic becomes a call."""
    if "!" not in source and "%" not in source:
        return source
    first, _, body = source.lstrip().partition("\n")
    if first.startswith("%%"):
        name, _, line = first[2:].strip().partition(" ")
        return f"__skep__.cell({name!r}, {line.strip()!r}, {body!r})"
    for _ in range(_MOST):
        try:
            ast.parse(source)
        except SyntaxError as error:
            changed = _rewrite(source, error.lineno or 0)
            if changed is None:
                return source
            source = changed
        except (ValueError, RecursionError, MemoryError):
            return source
        else:
            return source
    return source


def _rewrite(source: str, number: int) -> str | None:
    """Turn the line that Python stumbled over into a call, if it is a magic."""
    lines = source.split("\n")
    if not 0 < number <= len(lines):
        return None
    last = number
    while lines[last - 1].endswith("\\") and last < len(lines):
        last += 1
    text = "\n".join(lines[number - 1 : last])
    found = _LINE.fullmatch(text)
    if found is None:
        return None
    call = _call(found["mark"], found["rest"].strip(), found["name"])
    # As many lines as before: errors further down keep their numbers.
    lines[number - 1 : last] = [found["indent"] + call, *[""] * (last - number)]
    return "\n".join(lines)


def _call(mark: str, rest: str, name: str | None) -> str:
    if mark == "!":
        return f"{name} = __skep__.capture({rest!r})" if name else f"__skep__.shell({rest!r})"
    magic, _, line = rest.partition(" ")
    call = f"__skep__.line({magic!r}, {line.strip()!r})"
    return f"{name} = {call}" if name else call


class Magics:
    """What the calls do. It is `__skep__` in the cells' namespace."""

    def __init__(self, namespace: dict[str, Any], run: Callable[[str], Any], flush: Callable[[], None]) -> None:
        self._namespace = namespace
        self._run = run
        self._flush = flush
        self._lines: dict[str, Callable[[str], Any]] = {
            "cd": self._cd,
            "env": self._env,
            "matplotlib": lambda _: None,
            "pip": self._pip,
            "pwd": lambda _: os.getcwd(),
            "time": self._time,
            "timeit": self._timeit,
        }
        self._cells: dict[str, Callable[[str, str], Any]] = {
            "bash": self._bash,
            "sh": self._bash,
            "time": lambda line, body: self._time(f"{line}\n{body}"),
            "timeit": lambda line, body: self._timeit(f"{line}\n{body}"),
            "writefile": self._writefile,
        }

    def line(self, name: str, line: str) -> Any:
        if name not in self._lines:
            raise UnknownMagic(f"there is no %{name}; there are {', '.join(f'%{one}' for one in self._lines)}")
        return self._lines[name](line)

    def cell(self, name: str, line: str, body: str) -> Any:
        if name not in self._cells:
            raise UnknownMagic(f"there is no %%{name}; there are {', '.join(f'%%{one}' for one in self._cells)}")
        return self._cells[name](line, body)

    def shell(self, command: str) -> None:
        self._flush()
        self._namespace["_exit_code"] = subprocess.run(self._bash_argv(command), check=False).returncode

    def capture(self, command: str) -> list[str]:
        self._flush()
        ended = subprocess.run(self._bash_argv(command), stdout=subprocess.PIPE, check=False)
        self._namespace["_exit_code"] = ended.returncode
        return ended.stdout.decode(errors="replace").splitlines()

    def _bash_argv(self, command: str) -> list[str]:
        return ["/bin/bash", "-c", _NAMED.sub(self._value_of, command)]

    def _value_of(self, found: re.Match[str]) -> str:
        return str(self._namespace[found[1]]) if found[1] in self._namespace else found[0]

    def _bash(self, line: str, body: str) -> None:
        self._flush()
        code = subprocess.run(["/bin/bash", *line.split(), "-c", body], check=False).returncode
        if code != 0:
            raise CommandFailed(f"bash ended with code {code}")

    def _pip(self, line: str) -> None:
        command = [*_installer(), *line.split()]
        self._flush()
        code = subprocess.run(command, check=False).returncode
        importlib.invalidate_caches()
        if os.path.isdir(site.getusersitepackages()) and site.getusersitepackages() not in sys.path:
            site.addsitedir(site.getusersitepackages())
        if code != 0:
            raise CommandFailed(f"pip ended with code {code}")

    def _cd(self, line: str) -> None:
        os.chdir(os.path.expanduser(line or "~"))

    def _env(self, line: str) -> Any:
        name, equals, value = line.partition("=")
        if equals:
            os.environ[name.strip()] = value.strip()
            return None
        return os.environ.get(line) if line else dict(os.environ)

    def _time(self, code: str) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return self._run(code)
        finally:
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            print(f"CPU time: {_seconds(cpu)}\nWall time: {_seconds(wall)}")  # noqa: T201  what the magic is for

    def _timeit(self, code: str) -> None:
        import timeit

        timer = timeit.Timer(code.strip() or "pass", globals=self._namespace)
        count, total = timer.autorange()
        times = [total / count, *(one / count for one in timer.repeat(4, count))]
        text = f"best of {len(times)} runs of {count:,}: {_seconds(min(times))} each"
        print(text)  # noqa: T201  what the magic is for

    def _writefile(self, line: str, body: str) -> None:
        append = line.startswith("-a ")
        path = line[3:].strip() if append else line
        with open(path, "a" if append else "w", encoding="utf-8") as file:
            file.write(body)
        print(f"{'added to' if append else 'wrote'} {path}")  # noqa: T201  what the magic is for


def _installer() -> list[str]:
    """Return how to install for this interpreter; where its own folder cannot be written, below the home folder."""
    if importlib.util.find_spec("pip") is not None:
        own = sys.prefix != sys.base_prefix
        # Debian marks its Python as its own; nothing of it can change in here, packages go to the user's folder.
        os.environ.setdefault("PIP_BREAK_SYSTEM_PACKAGES", "1")
        if not own:
            os.environ.setdefault("PIP_USER", "1")
        return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "--python", sys.executable]
    raise CommandFailed("this Python has no pip, and there is no uv; add one of them to the workspace's environment")


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"
