"""The computer of one sample of an evaluation: what it is configured with, and how it is made."""

from __future__ import annotations

import asyncio
import io
import secrets
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, field_validator

from skep.errors import InvalidRequest, WorkspaceBusy
from skep.integrations import users
from skep.integrations.home import workspaces_at
from skep.sandbox.egress.network import Network
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox
from skep.workspace.workspaces import Workspaces

_LABELS = {"made-for": "inspect_ai"}


class SkepSandboxConfig(BaseModel):
    """What the sandbox of each sample is made with; without a word it has no network and an empty workspace."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: What isolates it: `bubblewrap`, `docker`, `gvisor` and so on.
    mechanism: str = "bubblewrap"
    #: A template of Skep's, whose packages every sample starts with.
    template: str | None = None
    #: A folder of this machine, whose files every sample gets a copy of in its workspace.
    folder: str | None = None
    #: Hosts that may be reached, and the named sets `pypi`, `npm`, `debian` and `github`.
    network: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    limits: Limits = Limits()
    #: What only the mechanism understands, such as the name of an image.
    options: Mapping[str, Any] = {}

    @field_validator("limits", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        known = {limit.name for limit in fields(Limits)}
        if isinstance(value, dict) and (unknown := value.keys() - known):
            raise ValueError(f"no such limit: {', '.join(sorted(map(str, unknown)))}; there are {', '.join(known)}")
        return value

    def __hash__(self) -> int:
        # inspect_ai keeps configurations in sets, and mappings have no hash.
        return hash(self.model_dump_json())

    @property
    def given(self) -> Mapping[str, Any]:
        """What the mechanism is told; bubblewrap is asked for a root that can add users, unless the options say not."""
        return {**users.OPTIONS, **self.options} if self.mechanism == "bubblewrap" else self.options

    @property
    def adds_users(self) -> bool:
        return self.mechanism == "bubblewrap" and bool(self.given["users"])

    @classmethod
    def load(cls, given: BaseModel | str | None) -> SkepSandboxConfig:
        """Take what a task says: nothing, a configuration, or the path of a YAML file."""
        match given:
            case None:
                return cls()
            case SkepSandboxConfig():
                return given
            case str():
                found = yaml.safe_load(Path(given).read_text())
                # A folder is meant as seen from the file that names it.
                config = cls.model_validate(found or {})
                if config.folder is None:
                    return config
                return config.model_copy(update={"folder": str(Path(given).parent / config.folder)})
            case _:
                raise InvalidRequest(
                    f"a sandbox of Skep cannot be configured with a {type(given).__name__}",
                    hint="use SkepSandboxConfig or a YAML file",
                )


@asynccontextmanager
async def computer(config: SkepSandboxConfig) -> AsyncIterator[Sandbox]:
    """Make a sandbox, do away with it at the end."""
    made = _from_nothing(config) if config.template is None else _from_template(config, config.template)
    async with made as sandbox:
        if config.adds_users:
            await users.equip(sandbox)
        if config.folder is not None:
            await _copy_in(sandbox, Path(config.folder))
        yield sandbox


def _from_nothing(config: SkepSandboxConfig) -> AbstractAsyncContextManager[Sandbox]:
    return Sandbox.create(
        limits=config.limits,
        env=config.env,
        network=_network(config),
        mechanism=config.mechanism,
        labels=_LABELS,
        options=config.given,
    )


@asynccontextmanager
async def _from_template(config: SkepSandboxConfig, template: str) -> AsyncIterator[Sandbox]:
    workspaces = _workspaces(config)
    workspace_id = f"sample-{secrets.token_hex(6)}"
    await workspaces.create(workspace_id, template=template, labels=_LABELS)
    try:
        async with workspaces.enter(workspace_id, network=_network(config), env=config.env) as sandbox:
            yield sandbox
    finally:
        await workspaces.destroy(workspace_id)


async def prepare(config: SkepSandboxConfig) -> None:
    """Do once what the samples of a task have in common: find the folder, build the template."""
    if config.folder is not None and not await asyncio.to_thread(Path(config.folder).is_dir):
        raise InvalidRequest(f"there is no folder {config.folder!r} to copy", hint="correct `folder`")
    if config.template is not None:
        async with computer(config):
            pass


async def clear(workspace_id: str | None) -> list[str]:
    """Do away with workspaces that evaluations left behind when they were killed; return their ids."""
    workspaces = _workspaces(SkepSandboxConfig())
    left = [
        manifest.id
        for manifest in workspaces.list()
        if _LABELS.items() <= manifest.labels.items() and workspace_id in (None, manifest.id)
    ]
    cleared = []
    for found in left:
        try:
            await workspaces.destroy(found)
        except WorkspaceBusy:
            continue  # an evaluation that goes on
        cleared.append(found)
    return cleared


def _workspaces(config: SkepSandboxConfig) -> Workspaces:
    return workspaces_at(limits=config.limits, mechanism=config.mechanism, options=config.given)


def _network(config: SkepSandboxConfig) -> Network | None:
    return Network.to(*config.network) if config.network else None


async def _copy_in(sandbox: Sandbox, folder: Path) -> None:
    packed = await asyncio.to_thread(_packed, folder)
    done = await sandbox.run(["tar", "-x", "--no-same-owner"], input=packed)
    if not done.ok:
        raise InvalidRequest(f"the folder {str(folder)!r} cannot be copied: {done.error_text.strip()}")


def _packed(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, arcname=path.name)
    return buffer.getvalue()
