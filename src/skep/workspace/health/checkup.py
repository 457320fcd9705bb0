"""Ask the interpreter of a workspace how it is, in one process.

What it answers comes from files that the agent can write: it is read with care, and decides nothing but a report.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ValidationError

from skep.errors import SkepError
from skep.sandbox.sandbox import Sandbox

PYTHON = "/workspace/.venv/bin/python"
_TIMEOUT_S = 20.0
_IMPORT_S = 60.0

#: Reads what is known of each package, and looks whether its files are there and as large as they should be. Imports
#: nothing of theirs: pandas alone would take longer than all the rest.
_PROBE = r"""
import json, os, re, sys
wanted, touched = json.load(sys.stdin)
wanted = set(wanted)
touched = None if touched is None else {*touched, ".."}
site = next((p for p in sys.path if p.endswith("site-packages")), "")
found, needed = {}, {}

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def wrong_files(folder):
    wrong, own = [], os.path.basename(folder) + "/RECORD"
    with open(os.path.join(folder, "RECORD"), encoding="utf-8") as file:
        for row in file:
            path, _, size = row.rstrip().rpartition(",")
            path = path.rpartition(",")[0]
            if not size or path == own or path.startswith('"'):
                continue
            if touched is not None and path.partition("/")[0] not in touched:
                continue
            try:
                right = os.stat(os.path.join(site, path)).st_size == int(size)
            except OSError:
                right = False
            if not right:
                wrong.append(path)
    return wrong

def needs(folder):
    with open(os.path.join(folder, "METADATA"), encoding="utf-8") as file:
        for line in file:
            if not line.strip():
                return
            if line.startswith("Requires-Dist:") and ";" not in line:
                yield canonical(re.match(r"\s*[\w.-]*", line[14:])[0].strip())

for name in os.listdir(site) if site else ():
    stem, _, kind = name.rpartition(".")
    if kind != "dist-info":
        continue
    package, folder = canonical(stem.rpartition("-")[0]), os.path.join(site, name)
    try:
        wrong = wrong_files(folder)
        for other in needs(folder):
            needed.setdefault(other, package)
    except (OSError, ValueError):
        wrong = [name]
    found[package] = [len(wrong), wrong[0][:200] if wrong else ""]
missing = {package: needed.get(package, "") for package in wanted | needed.keys() if package not in found}
print(json.dumps({"version": sys.version.split()[0], "missing": missing,
                  "damaged": {package: what for package, what in found.items() if what[0]}}))
"""

#: Imports what one package brings, as its own list of files names it.
_IMPORT = r"""
import importlib, importlib.metadata, sys
files = importlib.metadata.files(sys.argv[1]) or ()
names = {path.parts[0] for path in files if len(path.parts) == 2 and path.name == "__init__.py"}
names |= {path.stem for path in files if len(path.parts) == 1 and path.suffix == ".py"}
for name in sorted(names):
    if not name.startswith("_") and name.isidentifier():
        importlib.import_module(name)
"""

#: A package that allows only `import`, or nothing but files in it, is there all the same.
_RESOLVE = r"""
const find = require("module").createRequire("/workspace/")
for (const name of process.argv.slice(1))
  try { find.resolve(name) } catch (e) { if (e.code === "MODULE_NOT_FOUND") console.log(name) }
"""


class Answer(BaseModel):
    """What the interpreter says: which packages are missing, with one that needs each, and which have wrong files."""

    version: str
    missing: dict[str, str]
    damaged: dict[str, tuple[int, str]]

    def troubles(self) -> dict[str, str]:
        found = {
            name: "is not installed" + (f", and {who} needs it" if who else "") for name, who in self.missing.items()
        }
        for name, (count, first) in self.damaged.items():
            found[name] = f"has {count} files that are missing or altered, {first} among them"
        return {_plain(name): _plain(what) for name, what in found.items()}


@dataclass(frozen=True, slots=True)
class Pulse:
    """How the interpreter is: its version if it runs, else why it does not; and what is wrong with packages."""

    version: str | None
    reason: str = ""
    damaged: dict[str, str] = field(default_factory=dict)


async def feel(sandbox: Sandbox, expected: Collection[str], touched: Collection[str] | None) -> Pulse:
    """Run the interpreter once, and have it look at its packages.

    `touched` are the names in site-packages of which files may be wrong; None for all.
    """
    asked = json.dumps([sorted(expected), None if touched is None else sorted(touched)]).encode()
    try:
        ran = await sandbox.run([PYTHON, "-I", "-B", "-c", _PROBE], input=asked, timeout_s=_TIMEOUT_S)
        answer = Answer.model_validate_json(ran.stdout) if ran.ok else None
    except ValidationError:
        return Pulse(None, "it does not answer as Python does")
    except SkepError as error:
        return Pulse(None, error.message)
    if answer is None:
        return Pulse(None, _last_line(ran.error_text) or f"it ended with {ran.exit_code}")
    return Pulse(_plain(answer.version[:40]), damaged=answer.troubles())


async def imports(sandbox: Sandbox, package: str) -> str | None:
    """Import what a package brings; return why that fails, if it does."""
    ran = await sandbox.run([PYTHON, "-I", "-B", "-c", _IMPORT, package], timeout_s=_IMPORT_S)
    return None if ran.ok else _last_line(ran.error_text) or f"it ended with {ran.exit_code}"


async def resolves(sandbox: Sandbox, packages: Sequence[str]) -> dict[str, str]:
    """Ask Node itself for some packages; return those that it does not find."""
    ran = await sandbox.run(["/usr/bin/env", "node", "-e", _RESOLVE, *packages], timeout_s=_IMPORT_S)
    if not ran.ok:
        return dict.fromkeys(packages, f"cannot be looked for: {_last_line(ran.error_text)}")
    gone = set(ran.text.split())
    return {name: "is not found by Node" for name in packages if name in gone}


def _last_line(text: str) -> str:
    return _plain((text.strip().splitlines() or [""])[-1])


def _plain(text: str) -> str:
    """Return text from inside so that it can neither act on a terminal nor flood it."""
    return ascii(text[:250])[1:-1]
