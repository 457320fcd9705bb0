"""Whether it was the tool that failed, not what it ran: out of time, or a package that is not installed."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from skep.agent.actions import Action
from skep.agent.observations import Trouble
from skep.agent.tools.printed import trouble
from skep.workspace.snapshot.indexes import Ecosystem

if TYPE_CHECKING:
    from skep.sandbox.sandbox import Execution

_LOOKED_AT = 64 << 10
_MOST = 10
_PYTHON = re.compile(r"No module named '?([A-Za-z_][A-Za-z0-9_]{0,80})")
#: A path, an address and a module of Node itself are none.
_NODE = re.compile(
    r"Cannot find (?:module|package) '((?:@[a-z0-9._~-]{1,80}/)?[a-z0-9_~-][a-z0-9._~-]{0,80})(?:/[^']*)?'"
)
#: Packages that go by another name than the module that is imported.
_PACKAGES = {
    "Crypto": "pycryptodome",
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "fitz": "pymupdf",
    "git": "gitpython",
    "jwt": "pyjwt",
    "magic": "python-magic",
    "pptx": "python-pptx",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}


def missing_packages(text: str) -> tuple[Ecosystem, tuple[str, ...]]:
    """Return the packages that an output complains about; modules of Python itself are none."""
    text = text[-_LOOKED_AT:]
    modules = [name for name in dict.fromkeys(_PYTHON.findall(text)) if name not in sys.stdlib_module_names]
    if modules:
        return "python", tuple(_PACKAGES.get(name, name) for name in modules[:_MOST])
    return "node", tuple(dict.fromkeys(_NODE.findall(text)))[:_MOST]


def lacking(action: Action, *outputs: str, **told: Any) -> Trouble | None:
    """Say that a package is missing, if one of the outputs does."""
    for output in outputs:
        ecosystem, packages = missing_packages(output)
        if packages:
            message = f"a package is missing: {', '.join(packages)}"
            return trouble(action, "missing_package", message, ecosystem=ecosystem, packages=packages, **told)
    return None


def failed_by_itself(
    action: Action, done: Execution, told: dict[str, Any], *, timeout_s: float | None = None
) -> Trouble | None:
    """Say whether it was the tool that failed, not what it ran: out of time (where nobody had set one), or lacking."""
    if done.exit.limit == "time" and timeout_s is not None:
        message = f"it was not done within {timeout_s:g} s and was ended"
        return trouble(action, "tool_timeout", message, exit_code=done.exit_code, **told)
    return None if done.ok else lacking(action, done.error_text, done.text, exit_code=done.exit_code, **told)
