"""What the way out costs: the same client, on its own and in a sandbox behind the allow-list."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.report import Section
from skep.sandbox.egress.network import Network, Secret
from skep.sandbox.egress.tls import Authority, new_authority
from skep.sandbox.sandbox import Sandbox

ROUNDS, REQUESTS = 7, 100
BIG_MB, BIG_ROUNDS = 200, 5
AT_ONCE = 200
PYTHON = "/usr/bin/python3"
HOST = "bench.test"

METHOD = f"""\
One client, a few lines of Python on plain sockets, asks one server on loopback: "direct" outside, then the same inside
a sandbox whose allow-list names the server, without proxy variables, taking turns over {ROUNDS} rounds of {REQUESTS}
requests. "new" opens a connection for each request, with its look-up and its handshake; "kept" sends all on one.
With a secret, TLS is ended and begun anew at the proxy, the value is fetched from the controller for each request and
the answer is searched for it. Rates are the median of {BIG_ROUNDS} downloads of {BIG_MB} MB. Client, proxy and server
share the processors.
"""

_SERVER = """
import socket, ssl, sys, threading
certificate, big = sys.argv[1], bytes(1 << 20)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate)

def serve(client, secure):
    try:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if secure:
            client = context.wrap_socket(client, server_side=True)
        data = b''
        while True:
            while b'\\r\\n\\r\\n' not in data:
                more = client.recv(65536)
                if not more:
                    return
                data += more
            head, _, data = data.partition(b'\\r\\n\\r\\n')
            if b'/big' in head:
                client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n' % (SIZE << 20))
                for _ in range(SIZE):
                    client.sendall(big)
            else:
                client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 5\\r\\n\\r\\nhello')
    except OSError:
        pass
    finally:
        client.close()

def listen(secure):
    server = socket.create_server(('127.0.0.1', 0), backlog=1024)
    def accept():
        while True:
            threading.Thread(target=serve, args=(server.accept()[0], secure), daemon=True).start()
    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1]

print(listen(False), listen(True), flush=True)
sys.stdin.read()
""".replace("SIZE", str(BIG_MB))

_CLIENT = """
import json, os, selectors, socket, ssl, sys, time
kind, address, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
host, secret = sys.argv[5], os.environ.get('KEY', 'direct')
secure = kind.startswith('tls')
trust = os.environ.get('TRUST') or os.environ.get('SSL_CERT_FILE')
context = ssl.create_default_context(cafile=trust) if secure else None
request = b'GET /%b HTTP/1.1\\r\\nHost: %b\\r\\nAuthorization: Bearer %b\\r\\n\\r\\n'
plain = request % (b'big' if kind == 'big' else b'', host.encode(), secret.encode())

def connect():
    connection = socket.create_connection((address, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(connection, server_hostname=host) if secure else connection

def ask(connection):
    connection.sendall(plain)
    data = b''
    while not data.endswith(b'hello'):
        more = connection.recv(65536)
        assert more, data
        data += more

def big():
    connection, buffer, got = connect(), bytearray(1 << 20), 0
    before = time.perf_counter()
    connection.sendall(plain)
    while got < SIZE << 20:
        size = connection.recv_into(buffer)
        assert size, got
        got += size
    return got / 1e6 / (time.perf_counter() - before)

def many():
    connections = [connect() for _ in range(count)]
    failures = 0
    for connection in connections:
        connection.sendall(plain)
    for connection in connections:
        try:
            data = b''
            while not data.endswith(b'hello') and (more := connection.recv(65536)):
                data += more
            failures += not data.endswith(b'hello')
        except OSError:
            failures += 1
    return failures

def times():
    kept = connect() if kind.endswith('kept') else None
    for number in range(count + 5):
        before = time.perf_counter()
        connection = kept or connect()
        ask(connection)
        if number >= 5:
            yield (time.perf_counter() - before) * 1000
        if not kept:
            connection.close()

print(json.dumps(big() if kind == 'big' else many() if kind == 'many' else list(times())))
""".replace("SIZE", str(BIG_MB))

#: Runs the client: its kind and how often it asks.
Run = Callable[[str, int], Awaitable[str]]


@dataclass(slots=True)
class Ways:
    """The two ways to the same server."""

    direct: Run
    through: Run


def measure() -> Section:
    return asyncio.run(_measure())


async def _measure() -> Section:
    async with _ways() as ways:
        rows = [
            await _latency(ways, "HTTP GET, new", "new", "2 x direct + 1 ms", lambda direct: 2 * direct + 1),
            await _latency(ways, "HTTP GET, kept", "kept", "2 x direct + 1 ms", lambda direct: 2 * direct + 1),
            await _latency(ways, "HTTPS with a secret, new", "tls-new", "3 x direct + 2 ms", lambda ms: 3 * ms + 2),
            await _latency(ways, "HTTPS with a secret, kept", "tls-kept", "3 x direct + 2 ms", lambda ms: 3 * ms + 2),
            await _rate(ways),
            await _many(ways),
        ]
    return Section(
        name="reach",
        title="The way out of a sandbox",
        method=METHOD,
        columns=["what", "direct, p50", "through, p50", "through, p95", "goal", "met"],
        rows=rows,
    )


async def _latency(ways: Ways, what: str, kind: str, goal: str, bound: Callable[[float], float]) -> list[str]:
    direct: list[float] = []
    through: list[float] = []
    for _ in range(ROUNDS):
        direct += json.loads(await ways.direct(kind, REQUESTS))
        through += json.loads(await ways.through(kind, REQUESTS))
    floor, ours = statistics.median(direct), statistics.median(through)
    met = "yes" if ours <= bound(floor) else "no"
    p95 = statistics.quantiles(through, n=20)[-1]
    return [what, f"{floor:.2f} ms", f"{ours:.2f} ms", f"{p95:.2f} ms", f"<= {goal} = {bound(floor):.2f} ms", met]


async def _rate(ways: Ways) -> list[str]:
    direct = [float(await ways.direct("big", 1)) for _ in range(BIG_ROUNDS)]
    through = [float(await ways.through("big", 1)) for _ in range(BIG_ROUNDS)]
    floor, ours = statistics.median(direct), statistics.median(through)
    cells = [f"{floor:.0f} MB/s", f"{ours:.0f} MB/s", f"{min(through):.0f} MB/s (least)"]
    return [f"{BIG_MB} MB download", *cells, ">= 250 MB/s", "yes" if ours >= 250 else "no"]


async def _many(ways: Ways) -> list[str]:
    direct = sum([int(await ways.direct("many", AT_ONCE)) for _ in range(BIG_ROUNDS)])
    through = sum([int(await ways.through("many", AT_ONCE)) for _ in range(BIG_ROUNDS)])
    cells = [f"{direct} failed", f"{through} failed", ""]
    return [f"{AT_ONCE} connections at once", *cells, "none fails", "yes" if through == 0 else "no"]


@asynccontextmanager
async def _ways() -> AsyncIterator[Ways]:
    """Start the server and a sandbox that may reach it."""
    with tempfile.TemporaryDirectory(prefix="skep-bench-reach-") as name:
        folder = Path(name)
        key, certificate = new_authority()
        (folder / "server.pem").write_bytes(Authority(key, certificate)._issue(f"tls.{HOST}"))
        (folder / "trust.pem").write_bytes(certificate)
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, folder / "server.pem"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            plain, secure = map(int, server.stdout.readline().split())
            async with _sandbox(plain, secure, folder / "trust.pem") as sandbox:
                yield Ways(_directly(plain, secure, folder / "trust.pem"), _inside(sandbox))
        finally:
            server.kill()
            server.communicate()


@asynccontextmanager
async def _sandbox(plain: int, secure: int, trust: Path) -> AsyncIterator[Sandbox]:
    async def fetch() -> str:
        return "the-value-of-the-secret"

    network = Network.to(
        HOST,
        secrets={"KEY": Secret(f"tls.{HOST}", "Authorization", fetch)},
        upstreams={HOST: f"127.0.0.1:{plain}", f"tls.{HOST}": f"127.0.0.1:{secure}"},
        trust=str(trust),
    )
    async with Sandbox.create(network=network) as sandbox:
        yield sandbox


def _directly(plain: int, secure: int, trust: Path) -> Run:
    async def run(kind: str, count: int) -> str:
        port = secure if kind.startswith("tls") else plain
        child = await asyncio.create_subprocess_exec(
            PYTHON, "-c", _CLIENT, kind, "127.0.0.1", str(port), str(count), _name(kind),
            stdout=subprocess.PIPE, env={"TRUST": str(trust)},
        )  # fmt: skip
        said, _ = await child.communicate()
        assert child.returncode == 0
        return said.decode()

    return run


def _inside(sandbox: Sandbox) -> Run:
    async def run(kind: str, count: int) -> str:
        port = 443 if kind.startswith("tls") else 80
        ran = await sandbox.run([PYTHON, "-c", _CLIENT, kind, _name(kind), str(port), str(count), _name(kind)])
        assert ran.ok, ran.error_text
        return ran.text

    return run


def _name(kind: str) -> str:
    return f"tls.{HOST}" if kind.startswith("tls") else HOST
