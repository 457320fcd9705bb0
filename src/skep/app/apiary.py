"""The apiary: all workspaces of this machine, and what they come from, as the settings say."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypedDict

import structlog

from skep.app.computer import limits, log_event
from skep.config import Paths, Settings
from skep.config.secrets import StoreKeys
from skep.errors import Conflict, NotFound, WorkspaceBusy
from skep.sandbox.claim import claim
from skep.sandbox.egress.network import Network
from skep.sandbox.egress.policy import Policy, parse_policy
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount
from skep.workspace.indexes import Indexes
from skep.workspace.manifest import Manifest, Shown
from skep.workspace.snapshots import Snapshots
from skep.workspace.template import Resources, Template
from skep.workspace.templates import Templates
from skep.workspace.workspace import Workspace
from skep.workspace.workspaces import Workspaces

Tell = Callable[[str], None]
_MAKING_S = 60.0
_PAUSE_S = 0.02


def _quiet(_: str) -> None:
    """Tell nobody."""


class Outfit(TypedDict):
    """What `Workspaces.hold` and `enter` take."""

    network: Network | None
    env: Mapping[str, str]
    mounts: tuple[Mount, ...]


class Apiary:
    """The templates, snapshots and workspaces below one home."""

    def __init__(self, paths: Paths, settings: Settings, keys: StoreKeys | None = None) -> None:
        packages = settings.packages
        self.home = paths.home
        self.settings = settings
        self.keys = keys or StoreKeys()
        self.indexes = Indexes(packages.python_index, packages.node_registry, packages.upstreams)
        self.templates = Templates(paths.home / "templates")
        self.snapshots = Snapshots(paths.home, self.templates, indexes=self.indexes)
        self.workspaces = self._workspaces(limits(settings))

    def _workspaces(self, most: Limits) -> Workspaces:
        wanted = self.settings.workspace.layering
        return Workspaces(self.home, self.snapshots, limits=most, layering=None if wanted == "auto" else wanted)

    def has(self, workspace_id: str) -> bool:
        """Say whether there is such a workspace, be it damaged or not yet taken in."""
        return self.workspaces.register.condition(workspace_id) in ("ready", "plain")

    async def settle(
        self, workspace_id: str, shown: Sequence[Mount], *, template: str | None = None, tell: Tell = _quiet
    ) -> Manifest | None:
        """Make a workspace unless it is there, and let it show these folders; return the manifest of one that was made.

        The snapshot that it starts from is built first, if it has not been.
        """
        if (made := await self._create_missing(workspace_id, shown, template, tell)) is not None:
            return made
        wanted = tuple(Shown(host=mount.host, inside=mount.inside, mode=mount.mode) for mount in shown)
        if (
            self.workspaces.show(workspace_id).shown != wanted
        ):  # the home has moved, or the workspace came from elsewhere
            with suppress(WorkspaceBusy):
                async with self.workspaces.hold(workspace_id) as workspace:
                    await workspace.amend(shown=wanted)
        return None

    async def _create_missing(
        self, workspace_id: str, shown: Sequence[Mount], template: str | None, tell: Tell
    ) -> Manifest | None:
        """Make a workspace unless it is there; wait for another process that is making it."""
        deadline = time.monotonic() + _MAKING_S
        while self.workspaces.register.condition(workspace_id) != "ready":
            try:
                return await self.create(workspace_id, shown, template=template, tell=tell)
            except Conflict:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_PAUSE_S)
        return None

    async def create(
        self, workspace_id: str, shown: Sequence[Mount] = (), *, template: str | None = None, tell: Tell = _quiet
    ) -> Manifest:
        """Make a workspace from a template, by default from the one that the settings name."""
        name = template or self.settings.workspace.template
        self.templates.show(name)
        with suppress(NotFound):
            self.snapshots.latest(name)
            tell = _quiet
        tell(f"building the template {name}, which is done once")
        return await self.workspaces.create(workspace_id, template=name, shown=shown, on_progress=tell)

    @asynccontextmanager
    async def enter(
        self, workspace_id: str, *, allow: Sequence[str] = (), mounts: Sequence[Mount] = ()
    ) -> AsyncIterator[Sandbox]:
        """Use the sandbox of a workspace, together with whoever else does.

        The first to come decides what can be reached and what is shown. Who comes later and asks for more than the
        settings and the template give is refused with `WorkspaceBusy`, rather than left without it.
        """
        from skep.sandbox.joining import JoinedSandbox

        manifest = self.workspaces.show(workspace_id)
        outfit = self._outfit(manifest, allow, mounts)
        async with self._workspaces_of(manifest).enter(workspace_id, **outfit) as sandbox:
            if isinstance(sandbox, JoinedSandbox) and (allow or mounts):
                raise WorkspaceBusy(
                    f"workspace {workspace_id} is in use, and what it reaches and shows is settled until that ends",
                    hint="wait until the other command has ended, or leave out --allow and --ticket",
                )
            yield sandbox

    @asynccontextmanager
    async def hold(self, workspace_id: str) -> AsyncIterator[Workspace]:
        """Hold a workspace, as `Workspaces.hold` does, with what its template and the settings give it."""
        manifest = self.workspaces.show(workspace_id)
        async with self._workspaces_of(manifest).hold(workspace_id, **self._outfit(manifest)) as workspace:
            yield workspace

    def _workspaces_of(self, manifest: Manifest) -> Workspaces:
        return self._workspaces(with_resources(limits(self.settings), self._template(manifest).resources))

    def _outfit(self, manifest: Manifest, allow: Sequence[str] = (), mounts: Sequence[Mount] = ()) -> Outfit:
        template = self._template(manifest)
        environment = {"SHELL": f"/bin/{template.system.shell}"}
        if template.system.editor:
            environment["EDITOR"] = template.system.editor
        if manifest.snapshot_version is not None:
            environment |= self.snapshots.get(manifest.template, manifest.snapshot_version).environment
        places = tuple(self._places(manifest.id, template))
        return {"network": self.network(template, allow), "env": environment, "mounts": (*places, *mounts)}

    def network(self, template: Template, allow: Sequence[str] = ()) -> Network | None:
        """Return what may be reached: what the settings, a template and the caller allow; None if that is nothing."""
        policy = parse_policy([*self.settings.policy.allowed_hosts, *template.security.allowed_domains, *allow])
        if template.security.network == "packages":
            packages = self.indexes.network().policy
            policy = Policy((*policy.rules, *packages.rules), packages.upstreams)
        return Network(policy, on_event=log_event) if policy.rules else None

    def _template(self, manifest: Manifest) -> Template:
        try:
            return self.templates.show(manifest.template)
        except NotFound:  # then nothing is allowed beyond the settings
            log = structlog.get_logger("skep.workspace")
            log.warning("template_gone", workspace=manifest.id, template=manifest.template)
            return Template(version=1, name=manifest.template)

    def _places(self, workspace_id: str, template: Template) -> Iterator[Mount]:
        """Give the read-only places of a template a folder on the host, and what may be written in them another."""
        base = self.home / "places" / workspace_id
        security = template.security
        for path in sorted((*security.read_only_paths, *security.writable_paths)):
            folder = base / path.removeprefix("/workspace/")
            if path in security.writable_paths:
                fd, _ = claim(str(folder))  # what is written there belongs to a user of its own, not to root
                os.close(fd)
                yield Mount(str(folder), path, "read-write")
            else:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                yield Mount(str(folder), path)


def with_resources(most: Limits, wanted: Resources) -> Limits:
    """Lay what a template says about resources over the limits of the settings."""
    return replace(
        most,
        cpus=wanted.cpus or most.cpus,
        memory_bytes=(wanted.memory_mb or 0) * MIB or most.memory_bytes,
        disk_bytes=(wanted.disk_mb or 0) * MIB or most.disk_bytes,
        processes=wanted.processes or most.processes,
    )
