"""uv and npm as they are run in a sandbox: what they are told, what they print, and what their failures mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skep.sandbox.sandbox import Execution, Sandbox
from skep.workspace.faults import explained
from skep.workspace.snapshot.complaint import explain
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.resolution import Artifact, Resolution, read_pylock, requirements
from skep.workspace.snapshot.toolchain import NODE_HOME, UV, Node
from skep.workspace.template.requirement import node_package, python_name

#: Nothing but what is asked for, no questions, no news, and few tries: an index that is away is told of soon.
_SETTLED = {
    "NO_COLOR": "1",
    "UV_NO_CONFIG": "1",
    "UV_NO_PROGRESS": "1",
    "UV_PYTHON_DOWNLOADS": "never",
    "UV_HTTP_RETRIES": "2",
    "UV_LINK_MODE": "copy",
    "npm_config_audit": "false",
    "npm_config_fund": "false",
    "npm_config_update_notifier": "false",
    "npm_config_fetch_retries": "2",
    "npm_config_fetch_retry_mintimeout": "500",
    "npm_config_fetch_retry_maxtimeout": "4000",
}
#: Where what is needed only now is put: in memory, and gone with the sandbox.
_DESK = "/cache/skep"
#: What uv says of a package that it would have to ask the index for.
_NOT_CACHED = re.compile(r"network was disabled|Network connectivity is disabled")
#: How uv ends when the requirements cannot be met, as opposed to when it could not find out.
_UNSOLVED = 1


def environment(at: str) -> dict[str, str]:
    """Return the variables with which uv and npm use the cache in a folder inside."""
    return {**_SETTLED, "UV_CACHE_DIR": f"{at}/uv", "npm_config_cache": f"{at}/npm"}


@dataclass(frozen=True, slots=True)
class Journal:
    """Who is told of each step, and where everything that the programs print is kept."""

    tell: Callable[[str], None] = lambda _: None
    log: Path | None = None

    def keep(self, words: Sequence[str], ended: Execution) -> None:
        if self.log is not None:
            head, foot = f"$ {' '.join(words)}\n", f"[{ended.exit_code} after {ended.duration_s:.1f} s]\n\n"
            with explained(str(self.log)), open(self.log, "ab") as file:
                file.write(head.encode() + ended.stdout + ended.stderr + foot.encode())


@dataclass(frozen=True, slots=True)
class Installer:
    """uv and npm in one sandbox, with their caches in the folder `at`."""

    sandbox: Sandbox
    at: str
    indexes: Indexes = field(default_factory=Indexes)
    journal: Journal = field(default_factory=Journal)

    async def resolve_python(self, packages: Sequence[str], python: str, *, build: bool) -> tuple[Artifact, ...] | None:
        """Choose versions that go together.

        Without `build`, releases that exist as source only are passed over, and None says that there is no way then.
        """
        if not packages:
            return ()
        words = [
            UV,
            "pip",
            "compile",
            "-",
            "--format",
            "pylock.toml",
            "--no-header",
            "--no-annotate",
            "--python",
            python,
        ]
        words += [*self.indexes.python_flags(), *([] if build else ["--no-build"])]
        wanted = "".join(f"{package}\n" for package in packages).encode()
        ended = await self._run(words, input=wanted)
        if ended.exit_code == _UNSOLVED and not build and ended.limit is None:
            return None
        self._require(ended, [python_name(package) for package in packages], "choosing versions of Python packages")
        return read_pylock(ended.text)

    async def download_python(self, artifacts: Sequence[Artifact], python: str) -> None:
        """Bring wheels into the cache; what exists as source only is left out."""
        wheels = tuple(artifact for artifact in artifacts if not artifact.needs_build)
        if not wheels:
            return
        # Links into the cache take next to no room and time; they go with the sandbox.
        words = [*self._install(python), "--target", f"{_DESK}/python", "--link-mode", "symlink", "--no-build"]
        ended = await self._run(words, input=requirements(wheels))
        self._require(ended, [artifact.name for artifact in wheels], "fetching Python packages")

    async def install_python(self, artifacts: Sequence[Artifact], into: str, *, flags: Sequence[str] = ()) -> None:
        """Install exactly these files; source is built, and runs its own code in this sandbox."""
        if not artifacts:
            return
        words, lines = [*self._install(into), *flags], requirements(tuple(artifacts))
        # Wheels that were fetched are in the cache; asking the index again would only take time, or fail.
        wheels = not any(artifact.needs_build for artifact in artifacts)
        ended = await self._run([*words, *(["--offline"] if wheels else [])], input=lines)
        if _NOT_CACHED.search(ended.error_text):
            # Only then: after any other failure a package may lie there half installed, and would pass for whole.
            ended = await self._run([*words, "--reinstall"], input=lines)
        self._require(ended, [artifact.name for artifact in artifacts], "installing Python packages")

    async def make_venv(self, python: str) -> None:
        """Make an empty environment of Python in the workspace; it needs no network."""
        words = [
            UV,
            "venv",
            "--offline",
            "--no-project",
            "--prompt",
            "workspace",
            "--python",
            python,
            "/workspace/.venv",
        ]
        self._require(await self._run(words), (), "making the environment of Python")

    async def resolve_node(self, packages: Sequence[str], node: Node) -> bytes:
        """Choose versions of packages for JavaScript; return npm's lock."""
        if not packages:
            return b""
        await self._write(f"{_DESK}/package.json", package_json(packages))
        words = [*node.npm, "install", "--package-lock-only", "--ignore-scripts", *self.indexes.node_flags()]
        ended = await self._run(words, cwd=_DESK, env=node.environment)
        self._require(ended, node_names(packages), "choosing versions of Node packages")
        return (await self._run(["/bin/cat", f"{_DESK}/package-lock.json"])).stdout

    async def download_node(self, chosen: Resolution, node: Node) -> None:
        """Bring the archives that a lock names into the cache."""
        if files := chosen.node_files():
            words = [*node.npm, "cache", "add", "--ignore-scripts", *self.indexes.node_flags()]
            ended = await self._run([*words, *files], env=node.environment, told=words)
            self._require(ended, [*chosen.node_packages], "fetching Node packages")

    async def install_node(self, names: Sequence[str], node: Node) -> None:
        """Install what the lock in the workspace says, and run the packages' own scripts in this sandbox."""
        words = [*node.npm, "ci", "--prefer-offline", *self.indexes.node_flags()]
        ended = await self._run(words, cwd="/workspace", env=node.environment)
        self._require(ended, names, "installing Node packages")

    async def place_node(self, tool: Artifact, python: str) -> None:
        """Install a Node that this machine does not have."""
        await self.install_python([tool], python, flags=["--target", NODE_HOME, "--no-build"])

    async def run(self, words: Sequence[str], *, doing: str, env: Mapping[str, str] | None = None) -> Execution:
        """Run another program in the same sandbox, which has to succeed."""
        ended = await self._run(words, cwd="/workspace", env=env)
        self._require(ended, (), doing)
        return ended

    async def prune(self) -> None:
        await self._run([UV, "cache", "prune"])
        await self._run(["/bin/sh", "-c", "rm -rf npm/_logs npm/_cacache/tmp uv/.tmp*"], cwd="/workspace")

    def _install(self, python: str) -> list[str]:
        # Hashes are checked wherever there are some; an index need not announce any.
        return [UV, "pip", "install", "--python", python, "--no-deps", *self.indexes.python_flags(), "-r", "-"]

    async def _run(
        self,
        words: Sequence[str],
        *,
        input: bytes = b"",
        cwd: str = "/cache",
        env: Mapping[str, str] | None = None,
        told: Sequence[str] | None = None,
    ) -> Execution:
        ended = await self.sandbox.run(words, input=input, cwd=cwd, env={**environment(self.at), **(env or {})})
        self.journal.keep(told or words, ended)
        return ended

    async def _write(self, path: str, data: bytes) -> None:
        words = ["/bin/sh", "-c", 'mkdir -p "$(dirname "$0")" && cat > "$0"', path]
        self._require(await self._run(words, input=data), (), f"writing {path}")

    def _require(self, ended: Execution, names: Sequence[str], doing: str) -> None:
        if not ended.ok:
            raise explain(ended, names, doing=doing)


def node_names(packages: Sequence[str]) -> list[str]:
    return [node_package(package).name for package in packages]


def package_json(packages: Sequence[str]) -> bytes:
    """Write the manifest of a workspace that asks for these packages."""
    wanted = {package.name: package.wanted or "*" for package in map(node_package, packages)}
    return json.dumps({"name": "workspace", "private": True, "dependencies": wanted}, indent=2).encode() + b"\n"
