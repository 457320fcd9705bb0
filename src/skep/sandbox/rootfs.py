"""What of the host a sandbox sees: the system's programs, read-only, and the few files of /etc they need."""

from __future__ import annotations

import base64
import json
import os
import ssl
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skep.sandbox.launcher import Plan

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
#: Needed for names of libraries, programs, time zones, certificates and fonts; none holds a secret.
_ETC = (
    "/etc/alternatives", "/etc/crypto-policies", "/etc/fonts", "/etc/ld.so.cache", "/etc/localtime",
    "/etc/mime.types", "/etc/os-release", "/etc/pki/tls", "/etc/pki/ca-trust/extracted", "/etc/protocols",
    "/etc/python3", "/etc/services", "/etc/ssl/certs", "/etc/ssl/openssl.cnf",
)  # fmt: skip

_WRITTEN = {
    "/etc/passwd": (
        "root:x:0:0:root:/workspace:/bin/bash\n"
        "agent:x:1000:1000:agent:/workspace:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "/etc/group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
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
