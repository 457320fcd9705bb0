"""The apiary: all workspaces of this machine, and what they come from, as the settings say."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from skep.app.choosing import Chooser
from skep.app.computer import limits, log_event
from skep.config import Paths, Settings
from skep.config.secrets import StoreKeys
from skep.errors import ConfigInvalid, Conflict, NotFound, WorkspaceBusy, WorkspaceDamaged
from skep.sandbox.census import Census
from skep.sandbox.claim import claim
from skep.sandbox.egress.network import Network
from skep.sandbox.egress.policy import Policy, parse_policy
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount
from skep.workspace.acts import Act
from skep.workspace.holding import Taken
from skep.workspace.manifest import Manifest, Shown
from skep.workspace.packages import packages
from skep.workspace.packages.packages import Installed
from skep.workspace.snapshot.indexes import Indexes
from skep.workspace.snapshot.snapshots import Snapshots
from skep.workspace.template.template import Resources, Template
from skep.workspace.template.templates import Templates
from skep.workspace.workspace import Workspace
from skep.workspace.workspaces import Workspaces

if TYPE_CHECKING:  # archives bring ciphers and compression along, which few commands have a use for
    from skep.workspace.archive.archive import Archive, Restored, Saved
    from skep.workspace.archive.watch import Progress
    from skep.workspace.fallback import Fallback
    from skep.workspace.health.finding import Report
    from skep.workspace.health.repair import Repaired

Tell = Callable[[str], None]
TellProgress = Callable[["Progress"], None]
_MAKING_S = 60.0
_PAUSE_S = 0.02
#: An act such as a checkpoint holds a workspace for a moment.
_PATIENCE_S = 2.0


def quiet(_: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Outfit:
    """What the sandbox of a workspace has by its template and the settings."""

    network: Network | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()


class Furnished(Workspaces):
    """Workspaces whose sandboxes have an outfit, whoever starts them: a command, an act, or a guest that is let in."""

    outfit = Outfit()

    @asynccontextmanager
    async def hold(
        self,
        workspace_id: str,
        *,
        network: Network | None = None,
        env: Mapping[str, str] | None = None,
        mounts: Sequence[Mount] = (),
    ) -> AsyncIterator[Workspace]:
        own = self.outfit
        env, mounts = {**own.env, **(env or {})}, (*own.mounts, *mounts)
        async with super().hold(workspace_id, network=network or own.network, env=env, mounts=mounts) as workspace:
            yield workspace


def indexes(settings: Settings) -> Indexes:
    """Return where packages come from."""
    sources = settings.packages
    return Indexes(sources.python_index, sources.node_registry, sources.upstreams)


class Apiary:
    """The templates, snapshots and workspaces below one home.

    `chooser` says what holds the sandboxes over workspaces; snapshots are always built in bubblewrap.
    """

    def __init__(
        self, paths: Paths, settings: Settings, keys: StoreKeys | None = None, *, chooser: Chooser | None = None
    ) -> None:
        self.home = paths.home
        self.settings = settings
        self.keys = keys or StoreKeys()
        self.chooser = chooser or Chooser(settings)
        self.indexes = indexes(settings)
        self.templates = Templates(paths.home / "templates")
        self.snapshots = Snapshots(paths.home, self.templates, indexes=self.indexes)
        #: More that a process that holds a workspace does when another one asks.
        self.acts: dict[str, Act] = {}
        self.workspaces = self._workspaces(limits(settings))

    def _workspaces(self, most: Limits) -> Furnished:
        wanted = self.settings.workspace.layering
        return Furnished(
            self.home,
            self.snapshots,
            limits=most,
            layering=None if wanted == "auto" else wanted,
            settle=[packages.settle],
            acts={**packages.acts(self.indexes, self.snapshots.cache), "archive": self._archive_act, **self.acts},
            choose=self.chooser.for_workspace,
            reach=self.chooser.reach,
        )

    def at(self, workspace_id: str) -> Furnished:
        """Return the workspaces as they are for one of them: with the limits and the outfit that it has."""
        manifest = self.workspaces.show(workspace_id)
        template = self._template(manifest)
        found = self._workspaces(with_resources(limits(self.settings), template.resources))
        found.outfit = self._outfit(manifest, template)
        return found

    def has(self, workspace_id: str) -> bool:
        """Say whether there is such a workspace, be it damaged or not yet taken in."""
        return self.workspaces.register.condition(workspace_id) in ("ready", "plain")

    def ids(self) -> list[str]:
        """Return the ids of all workspaces, whole or not, and of those of which only the files are left."""
        found = self.workspaces.census()
        return sorted({*found.manifests, *found.damaged, *found.half_made, *found.plain, *self.workspaces.lost()})

    async def settle(
        self,
        workspace_id: str,
        shown: Sequence[Mount],
        *,
        template: str | None = None,
        labels: Mapping[str, str] | None = None,
        tell: Tell = quiet,
    ) -> Manifest | None:
        """Make a workspace unless it is there, and let it show these folders; return the manifest of one that was made.

        The snapshot that it starts from is built first, if it has not been. `labels` say whose a new one is.
        """
        create = partial(self.create, workspace_id, shown, template=template, labels=labels, tell=tell)
        if (made := await self._create_missing(workspace_id, create)) is None:
            await self.let_show(workspace_id, shown)
        return made

    async def let_show(self, workspace_id: str, shown: Sequence[Mount]) -> None:
        """Let a workspace show these folders: others than before when the home has moved, or it came from elsewhere."""
        wanted = tuple(Shown(host=mount.host, inside=mount.inside, mode=mount.mode) for mount in shown)
        if self.workspaces.show(workspace_id).shown != wanted:
            with suppress(WorkspaceBusy):
                async with self.at(workspace_id).hold(workspace_id) as workspace:
                    await workspace.amend(shown=wanted)

    async def _create_missing(self, workspace_id: str, create: Callable[[], Awaitable[Manifest]]) -> Manifest | None:
        """Make a workspace unless it is there; wait for another process that is making it."""
        deadline = time.monotonic() + _MAKING_S
        while self.workspaces.register.condition(workspace_id) != "ready":
            try:
                return await create()
            except Conflict:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_PAUSE_S)
        return None

    async def create(
        self,
        workspace_id: str,
        shown: Sequence[Mount] = (),
        *,
        template: str | None = None,
        labels: Mapping[str, str] | None = None,
        tell: Tell = quiet,
    ) -> Manifest:
        """Make a workspace from a template, by default from the one that the settings name."""
        name = template or self.settings.workspace.template
        self.templates.show(name)
        with suppress(NotFound):
            self.snapshots.latest(name)
            tell = quiet
        tell(f"building the template {name}, which is done once")
        return await self.workspaces.create(workspace_id, template=name, shown=shown, labels=labels, on_progress=tell)

    @asynccontextmanager
    async def enter(
        self, workspace_id: str, *, allow: Sequence[str] = (), mounts: Sequence[Mount] = ()
    ) -> AsyncIterator[Sandbox]:
        """Use the sandbox of a workspace, together with whoever else does.

        The first to come decides what can be reached and what is shown. Who comes later and asks for more than the
        settings and the template give is refused with `WorkspaceBusy`, rather than left without it.
        """
        workspaces = self.at(workspace_id)
        network = self.network_for(workspace_id, allow)
        deadline = time.monotonic() + _PATIENCE_S
        async with AsyncExitStack() as entered:
            while True:
                sandbox = await entered.enter_async_context(
                    workspaces.enter(workspace_id, network=network, mounts=mounts)
                )
                if sandbox.mechanism != "joined" or not (allow or mounts):
                    break
                await entered.aclose()
                if time.monotonic() > deadline:
                    raise settled(workspace_id)
                await asyncio.sleep(_PAUSE_S)
            yield sandbox

    async def install(
        self, workspace_id: str, *, python: Sequence[str], node: Sequence[str], tell: Tell = quiet
    ) -> Installed:
        """Install packages, here or in the process that holds the workspace."""
        workspaces = self.at(workspace_id)
        await self.chooser.require(workspaces.show(workspace_id))
        try:
            async with workspaces.hold(workspace_id) as workspace:
                return await self.install_into(workspace, python=python, node=node, tell=tell)
        except Taken:
            tell("the process that holds the workspace installs them")
            done = await workspaces.act(workspace_id, "install", {"python": list(python), "node": list(node)})
            return Installed(**done)

    async def install_into(
        self, workspace: Workspace, *, python: Sequence[str], node: Sequence[str], tell: Tell = quiet
    ) -> Installed:
        """Install packages into a workspace that the caller holds."""
        cache = self.snapshots.cache
        return await packages.install(
            workspace, python=python, node=node, indexes=self.indexes, cache=cache, on_progress=tell
        )

    async def step_back(self, workspace_id: str) -> Fallback | None:
        """Return a workspace of which folders are missing to its last good state; None if nothing is missing."""
        from skep.workspace.fallback import step_back

        return await step_back(self.workspaces, workspace_id)

    async def rehouse(self, old_id: str, new_id: str, *, labels: Mapping[str, str]) -> None:
        """Give a workspace another id, with the places that its template has given it."""
        from skep.workspace.rehousing import rehouse

        places = self.home / "places"
        await rehouse(self.workspaces, old_id, new_id, labels=labels)
        with suppress(FileNotFoundError):
            (places / old_id).rename(places / new_id)

    async def examine(self, workspace_id: str, *, thorough: bool = False) -> Report:
        """Look at everything that can be wrong with a workspace."""
        from skep.workspace.health.health import examine

        return await examine(self._at_any(workspace_id), workspace_id, thorough=thorough)

    async def repair(self, workspace_id: str, *, tell: Tell = quiet) -> Repaired:
        """Put right what is wrong with a workspace, as far as its snapshot and its manifest tell how it should be."""
        from skep.workspace.health.repair import repair

        workspaces = self._at_any(workspace_id)
        cache = self.snapshots.cache
        return await repair(workspaces, workspace_id, indexes=self.indexes, cache=cache, on_progress=tell)

    def _at_any(self, workspace_id: str) -> Furnished:
        """Return the workspaces as they are for one of them, or as they are for all if that one cannot be read."""
        try:
            return self.at(workspace_id)
        except (WorkspaceDamaged, NotFound):
            return self.workspaces

    def archive(self) -> Archive:
        """Open the store of archives, with the key that stays on this machine; it is made with the first use."""
        from skep.workspace.archive.archive import Archive
        from skep.workspace.archive.key import ensure_key
        from skep.workspace.archive.store import Credentials, open_store

        url = self.settings.workspace.archive_url or str(self.home / "archives")
        if self.keys.region and url.startswith("s3:") and "region=" not in url:
            url += f"{'&' if '?' in url else '?'}region={self.keys.region}"
        keys, credentials = self.keys, None
        if keys.access_key_id is not None and keys.secret_access_key is not None:
            credentials = Credentials(keys.access_key_id, keys.secret_access_key, keys.session_token)
        elif url.startswith("s3:"):
            raise ConfigInvalid(
                "the store of archives needs keys, which come from the environment",
                hint="export SKEP_S3_ACCESS_KEY_ID=… SKEP_S3_SECRET_ACCESS_KEY=…",
            )
        store = open_store(url, credentials=credentials)
        return Archive(store, ensure_key(self.home / "keys" / "archive.key"), memory=self.home / "archived")

    async def put_away(self, workspace_id: str, *, on_progress: TellProgress | None = None) -> Saved:
        """Save a workspace to the store of archives, here or in the process that holds it."""
        from skep.workspace.archive.archive import Saved
        from skep.workspace.archiving import save

        workspaces = self.at(workspace_id)
        try:
            async with workspaces.hold(workspace_id) as workspace:
                return await save(workspace, self.archive(), on_progress=on_progress)
        except Taken:
            return Saved(**await workspaces.act(workspace_id, "archive"))

    async def _archive_act(self, workspace: Workspace, _: Mapping[str, Any]) -> dict[str, Any]:
        from skep.workspace.archiving import save

        return asdict(await save(workspace, self.archive()))

    async def bring_back(
        self,
        name: str,
        *,
        version: str | None = None,
        workspace_id: str | None = None,
        shown: Sequence[Mount] = (),
        labels: Mapping[str, str] | None = None,
        on_progress: TellProgress | None = None,
    ) -> tuple[Manifest, Restored]:
        """Make a workspace of an archive; see `Homecoming.restore`."""
        from skep.workspace.archiving import Homecoming

        homecoming = Homecoming(self.archive(), self.workspaces, self.snapshots, on_progress)
        return await homecoming.restore(name, version=version, workspace_id=workspace_id, shown=shown, labels=labels)

    async def destroy(
        self, workspace_id: str, *, archived: bool, on_progress: TellProgress | None = None
    ) -> Saved | None:
        """Do away with a workspace that nobody holds; `archived`, not before it has been put away."""
        from skep.workspace.archiving import save

        saved: list[Saved] = []

        async def put_away(workspace: Workspace) -> None:
            saved.append(await save(workspace, self.archive(), on_progress=on_progress))

        await self.workspaces.destroy(workspace_id, archive=put_away if archived else None)
        return saved[0] if saved else None

    def weigh(self, manifest: Manifest) -> int:
        """Say how many bytes a workspace takes beyond its snapshot."""
        trees = self.workspaces.trees
        fd = os.open(trees.tree(manifest.upper), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return trees.weigh(manifest.sealed()).size + Census.take(fd).size
        finally:
            os.close(fd)

    def _outfit(self, manifest: Manifest, template: Template) -> Outfit:
        environment = {"SHELL": f"/bin/{template.system.shell}"}
        if template.system.editor:
            environment["EDITOR"] = template.system.editor
        return Outfit(self.network(template), environment, tuple(self._places(manifest.id, template)))

    def network(self, template: Template, allow: Sequence[str] = ()) -> Network | None:
        """Return what may be reached: what the settings, a template and the caller allow; None if that is nothing."""
        wanted = self.settings.policy
        allowed = (*wanted.allowed_hosts, *template.security.allowed_domains, *allow)
        policy = parse_policy(allowed, upstreams=wanted.upstreams)
        if template.security.network == "packages":
            indexes = self.indexes.network().policy
            policy = Policy((*policy.rules, *indexes.rules), {**policy.upstreams, **indexes.upstreams})
        return Network(policy, on_event=log_event) if policy.rules else None

    def network_for(self, workspace_id: str, allow: Sequence[str]) -> Network | None:
        """Return what a workspace may reach if the caller allows more; None if nothing more is allowed."""
        return self.network(self._template(self.workspaces.show(workspace_id)), allow) if allow else None

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


def settled(workspace_id: str) -> WorkspaceBusy:
    """Say that a sandbox that runs cannot be given more."""
    return WorkspaceBusy(
        f"workspace {workspace_id} is in use, and what it reaches and shows is settled until that ends",
        hint="wait until the other command has ended, or leave out --allow and --ticket",
    )


def with_resources(most: Limits, wanted: Resources) -> Limits:
    """Lay what a template says about resources over the limits of the settings."""
    return replace(
        most,
        cpus=wanted.cpus or most.cpus,
        memory_bytes=(wanted.memory_mb or 0) * MIB or most.memory_bytes,
        disk_bytes=(wanted.disk_mb or 0) * MIB or most.disk_bytes,
        processes=wanted.processes or most.processes,
    )
