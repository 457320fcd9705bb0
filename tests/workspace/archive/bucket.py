"""A bucket on an S3 server of this machine, and a way to it that can be cut."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from moto.server import ThreadedMotoServer

from skep.workspace.archive.store import Credentials, Store, open_store

CREDENTIALS = Credentials("access", "secret")


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Run an S3 server on loopback and give its endpoint."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket by its server's endpoint."""

    endpoint: str
    name: str

    def create(self) -> None:
        host, port = self.endpoint.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("PUT", f"/{self.name}", headers={"Host": f"{host}:{port}"})
        assert connection.getresponse().status == 200
        connection.close()

    def open(
        self, *, endpoint: str | None = None, patience_s: float = 20.0, credentials: Credentials = CREDENTIALS
    ) -> Store:
        url = f"s3://{self.name}/some/place?endpoint={endpoint or self.endpoint}"
        return open_store(url, credentials=credentials, patience_s=patience_s)


class Wire:
    """A way to a server that lets so many bytes pass and is cut then; `mend` lets everything pass again."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._left: int | None = None
        self._once = False
        self._lock = threading.Lock()
        self.cuts = 0
        self.heads: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def cut_after(self, count: int, *, once: bool = False) -> None:
        """Let so many bytes pass in either direction, then cut every connection, or only the one that comes next."""
        with self._lock:
            self._left, self._once = count, once

    def mend(self) -> None:
        with self._lock:
            self._left = None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._server) as server:
            other = {client: server, server: client}
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(1 << 16)
                    if source is client:
                        self.heads.append(data[:4096])
                    if not data or not self._may_pass(len(data)):
                        return
                    other[source].sendall(data)

    def _may_pass(self, count: int) -> bool:
        with self._lock:
            if self._left is None:
                return True
            self._left -= count
            if self._left >= 0:
                return True
            self.cuts += 1
            if self._once:
                self._left = None
            return False
