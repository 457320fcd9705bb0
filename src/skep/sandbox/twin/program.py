"""The program that is sent in, made of the modules in `inside/`."""

from __future__ import annotations

import io
import marshal
import zipfile
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path

_SANDBOX = Path(__file__).parent.parent
_PACKAGES = ("skep", "skep/sandbox", "skep/sandbox/twin")
_MAIN = b"from skep.sandbox.twin.inside.main import main\nmain()\n"
#: One date for all, so that the same source is the same program.
_DATE = (2020, 1, 1, 0, 0, 0)


@cache
def twin_program() -> bytes:
    """Return the program as one file, which Python 3.9 or newer runs: `python3 -I -u twin.py [--home DIR] …`."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_entry("__main__.py"), _MAIN)
        for package in _PACKAGES:
            archive.writestr(_entry(f"{package}/__init__.py"), b"")
        shared = (_SANDBOX / name for name in ("census.py", "erase.py", "mark.py"))
        for path in (*shared, *sorted((_SANDBOX / "twin/inside").glob("*.py"))):
            name = f"skep/sandbox/{path.relative_to(_SANDBOX)}"
            archive.writestr(_entry(name), path.read_bytes())
            archive.writestr(_entry(f"{name}c"), _compiled(path, name))
    return whole.getvalue()


def _compiled(path: Path, name: str) -> bytes:
    """Return the bytecode for this version of Python, with which the start takes half as long; others ignore it."""
    code = compile(path.read_bytes(), name, "exec", dont_inherit=True, optimize=0)
    never_checked = (1).to_bytes(4, "little") + bytes(8)
    # In a form without references: which objects have one depends on whatever else the process holds.
    return MAGIC_NUMBER + never_checked + marshal.dumps(code, 2)


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry
