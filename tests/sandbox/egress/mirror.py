"""A package index, a registry and a git server in one, on loopback: small, and real enough for the real programs."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import ssl
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from skep.sandbox.egress.tls import Authority

GIT_BACKEND = Path("/usr/lib/git-core/git-http-backend")


@dataclass(slots=True)
class Mirror:
    """Where the two ports of a mirror are, and whom it was asked for."""

    port: int
    tls_port: int
    hosts: list[str] = field(default_factory=list)


@cache
def wheel() -> bytes:
    """Make the wheel of a package with one module."""
    files = {
        "tinypkg.py": "ANSWER = 42\n",
        "tinypkg-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinypkg\nVersion: 1.0\n",
        "tinypkg-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{name},sha256={_digest(text)},{len(text)}" for name, text in files.items()]
    files["tinypkg-1.0.dist-info/RECORD"] = "\n".join([*rows, "tinypkg-1.0.dist-info/RECORD,,"]) + "\n"
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return memory.getvalue()


@cache
def tarball() -> bytes:
    """Make the archive of a package for npm."""
    files = {"package.json": json.dumps({"name": "tinypkg", "version": "1.0.0"}), "index.js": "module.exports = 42\n"}
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mode = len(text), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    return memory.getvalue()


def repository(folder: Path) -> None:
    """Make a bare repository with one file."""
    author = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@test", "GIT_COMMITTER_NAME": "a"}
    env = {**author, "GIT_COMMITTER_EMAIL": "a@test", "HOME": str(folder), "PATH": os.environ["PATH"]}
    work = folder / "work"
    for command in (
        ["init", "-q", "-b", "main", str(work)], ["-C", str(work), "commit", "-q", "--allow-empty", "-m", "first"],
        ["clone", "-q", "--bare", str(work), str(folder / "repo.git")],
    ):  # fmt: skip
        subprocess.run(["git", *command], check=True, env=env, capture_output=True)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mirror: Mirror
    folder: Path

    def do_GET(self) -> None:
        self.mirror.hosts.append(self.headers["Host"])
        path = self.path.partition("?")[0]
        if path.startswith("/repo.git/"):
            self._git(b"")
        elif path == "/simple/tinypkg/":
            digest = hashlib.sha256(wheel()).hexdigest()
            link = f'<a href="/files/tinypkg-1.0-py3-none-any.whl#sha256={digest}">tinypkg-1.0-py3-none-any.whl</a>'
            self._send("text/html", f"<!DOCTYPE html><html><body>{link}</body></html>".encode())
        elif path.startswith("/files/"):
            self._send("application/zip", wheel())
        elif path == "/tinypkg":
            self._send("application/json", json.dumps(self._packument()).encode())
        elif path == "/tinypkg/-/tinypkg-1.0.0.tgz":
            self._send("application/octet-stream", tarball())
        else:
            self.send_error(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        self._git(body)

    def _packument(self) -> dict[str, object]:
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(tarball()).digest()).decode()
        scheme = "https" if isinstance(self.connection, ssl.SSLSocket) else "http"
        address = f"{scheme}://{self.headers['Host']}/tinypkg/-/tinypkg-1.0.0.tgz"
        version = {"name": "tinypkg", "version": "1.0.0", "dist": {"tarball": address, "integrity": integrity}}
        return {"name": "tinypkg", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}

    def _git(self, body: bytes) -> None:
        path, _, query = self.path.partition("?")
        env = {
            "GIT_PROJECT_ROOT": str(self.folder), "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": path, "QUERY_STRING": query,
            "REQUEST_METHOD": self.command, "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""), "PATH": "/usr/bin:/bin",
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""), "CONTENT_LENGTH": str(len(body)),
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }  # fmt: skip
        answer = subprocess.run([GIT_BACKEND], input=body, env=env, capture_output=True, check=True).stdout
        head, _, content = answer.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
        self._send(fields["Content-Type"], content)

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def running_mirror(folder: Path, authority: tuple[bytes, bytes], name: str) -> Iterator[Mirror]:
    """Run a mirror on loopback, plain and with a certificate for one name."""
    mirror = Mirror(0, 0)
    repository(folder)
    handler = type("Handler", (_Handler,), {"mirror": mirror, "folder": folder})
    plain, secure = (ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2))
    secure.socket = Authority(*authority).context(name).wrap_socket(secure.socket, server_side=True)
    mirror.port, mirror.tls_port = plain.server_address[1], secure.server_address[1]
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in (plain, secure)]
    for thread in threads:
        thread.start()
    try:
        yield mirror
    finally:
        for server, thread in zip((plain, secure), threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()
