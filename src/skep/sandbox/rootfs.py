"""What of the host a sandbox sees: the system's programs, read-only, and the few files of /etc they need."""

from __future__ import annotations

import base64
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from skep.errors import InvalidRequest

if TYPE_CHECKING:
    from skep.sandbox.launcher import Plan

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
#: Needed for names of libraries, programs, time zones, certificates and fonts; none holds a secret.
_ETC = (
    "/etc/alternatives", "/etc/crypto-policies", "/etc/fonts", "/etc/ld.so.cache", "/etc/localtime",
    "/etc/mime.types", "/etc/os-release", "/etc/pki/tls", "/etc/pki/ca-trust/extracted", "/etc/protocols",
    "/etc/python3", "/etc/services", "/etc/ssl/certs", "/etc/ssl/openssl.cnf",
)  # fmt: skip


def users(uid: int, gid: int) -> dict[str, str]:
    """Return the files by which this user inside is named `agent`."""
    return {
        "/etc/passwd": (
            "root:x:0:0:root:/workspace:/bin/bash\n"
            f"agent:x:{uid}:{gid}:agent:/workspace:/bin/bash\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        ),
        "/etc/group": f"root:x:0:\nagent:x:{gid}:\nnogroup:x:65534:\n",
    }


_WRITTEN = {
    **users(1000, 1000),
    "/etc/hosts": "127.0.0.1 localhost skep\n::1 localhost\n",
    "/etc/hostname": "skep\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "/etc/shells": "/bin/sh\n/bin/bash\n",
}


@dataclass(frozen=True, slots=True)
class Plank:
    """One piece of the root file system: a path of the host shown inside, or a small file made up for it."""

    source: Path | str | bytes
    inside: str
    #: Laid over a file that is there already, in a folder of the host's that nobody inside can write.
    over: bool = False

    def lay(self, plan: Plan) -> None:
        match self.source:
            case bytes(data) if self.over:
                plan.add("--ro-bind-data", str(plan.number(plan.memory(data))), self.inside)
            case bytes(data):
                plan.add("--perms", "0444", "--file", str(plan.number(plan.memory(data))), self.inside)
            case str(text):
                plan.add("--perms", "0444", "--file", str(plan.number(plan.memory(text.encode()))), self.inside)
            case Path() as path if path.is_symlink():
                plan.add("--symlink", os.readlink(path), self.inside)
            case Path() as path if path.is_file() and path.is_relative_to("/etc"):
                # A copy into the root costs less than a mount.
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                plan.add("--perms", "0444", "--file", str(plan.number(fd)), self.inside)
            case Path() as path if plan.owner is None or _open_to_all(path):
                plan.add("--ro-bind", str(path), self.inside)
            case Path() as path:
                plan.bind(os.open(path, os.O_PATH | os.O_CLOEXEC), self.inside)


def _open_to_all(path: Path) -> bool:
    """Say whether a user that owns nothing can walk to a path."""
    return all(parent.stat().st_mode & 0o001 for parent in path.parents)


@cache
def system_planks() -> tuple[Plank, ...]:
    """Return what every sandbox sees of this host."""
    shown = [Plank(Path(path), path) for path in (*_SYSTEM, *_ETC) if os.path.lexists(path)]
    return (*shown, *(Plank(text, path) for path, text in _WRITTEN.items()))


#: Where a sandbox with a network finds the certificates it trusts: the host's, and that of its own authority.
TRUSTED = "/run/skep/certificates.pem"
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")


def network_planks(certificate: bytes) -> list[Plank]:
    """Return what a sandbox with a network sees in addition: a resolver, and whom to trust."""
    bundles = [path for path in _BUNDLES if os.path.isfile(path)]
    trusted = b"".join(Path(path).read_bytes() for path in bundles[:1]) + certificate
    planks = [Plank("nameserver 127.0.0.1\noptions timeout:2 attempts:2\n", "/etc/resolv.conf")]
    planks += [Plank(trusted, TRUSTED), *(Plank(trusted, path, over=True) for path in bundles)]
    # Chromium reads no bundle. Its policy adds the one authority and, unlike its flags, switches no check off.
    authority = base64.b64encode(ssl.PEM_cert_to_DER_cert(certificate.decode())).decode()
    planks.append(Plank(json.dumps({"CACertificates": [authority]}), "/etc/chromium/policies/managed/skep.json"))
    return planks


def extra_planks(read_only: Mapping[str, str]) -> list[Plank]:
    """Return what of the host a sandbox is to see besides: where it is there to where it appears inside."""
    # Real paths: a link of the host, shown as a link, could lead a later mount point to a folder the agent writes.
    for host in read_only:
        if not os.path.exists(host):
            raise InvalidRequest(f"there is nothing at {host!r} to show", hint="give a path that exists on the host")
    return [Plank(Path(os.path.realpath(host)), mount_point(inside)) for host, inside in read_only.items()]


def mount_point(inside: str) -> str:
    """Return the plain form of a path at which something may be shown, or refuse it."""
    # Two leading slashes survive normpath, and would hide the first folder's name.
    clean = "/" + os.path.normpath(inside).lstrip("/")
    taken = ("", "workspace", "tmp", "cache", "dev", "proc")
    if not inside.startswith("/") or clean.split("/")[1] in taken or f"{clean}/".startswith("/run/skep/"):
        raise InvalidRequest(
            f"nothing can be mounted at {inside!r}",
            hint="choose a path that the agent cannot write to, such as /opt/tools",
        )
    return clean
