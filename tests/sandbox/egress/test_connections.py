"""Connections through the proxy, end to end: what is allowed passes whole, whatever the protocol."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.sandbox.egress.site import BIG, Site, running_site

from skep.errors import InvalidRequest, SandboxUnusable
from skep.sandbox.egress.gate import Gate, Passage, gate
from skep.sandbox.egress.network import Event, Network, Secret
from skep.sandbox.egress.policy import parse_policy
from skep.sandbox.egress.tls import new_authority
from skep.sandbox.sandbox import Sandbox

PYTHON = "/usr/bin/python3"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site(name="secure.test") as made:
        yield made


@asynccontextmanager
async def sandbox_to(site: Site, *allow: str, **options: object) -> AsyncIterator[Sandbox]:
    upstreams = {"plain.test": site.address, "other.test": site.address, "secure.test": site.tls_address}
    allow = allow or ("plain.test", "plain.test:8080", "other.test", "secure.test")
    async with Sandbox.create(network=Network.to(*allow, upstreams=upstreams, **options)) as sandbox:  # type: ignore[arg-type]
        yield sandbox


async def fetched(secret: str = "a-value-of-a-secret") -> str:
    return secret


async def test_requests_follow_each_other_on_one_connection(site: Site) -> None:
    async with sandbox_to(site) as sandbox:
        pages = " ".join(f"http://plain.test/{page}" for page in ("one", "chunks", "big", "two"))
        ran = await sandbox.run(f"curl -sS {pages} | wc -c")
        assert int(ran.text) > BIG
        assert [seen.path for seen in site.seen] == ["/one", "/chunks", "/big", "/two"]
        assert site.connections == 1


async def test_a_proxy_takes_requests_for_several_hosts_on_one_connection(site: Site) -> None:
    async with sandbox_to(site) as sandbox:
        ran = await sandbox.run("curl -sS -x http://127.0.0.1:3128 http://plain.test/a http://other.test/b")
        assert ran.ok, ran.error_text
        assert [seen.host for seen in site.seen] == ["plain.test", "other.test"]


async def test_bodies_pass_whole_with_a_length_and_in_chunks(site: Site) -> None:
    async with sandbox_to(site) as sandbox:
        await sandbox.run("head -c 3000000 /dev/urandom > body")
        for option in ("", "-H 'Transfer-Encoding: chunked'"):
            ran = await sandbox.run(
                f"curl -sS {option} --data-binary @body http://plain.test/ -o answer && wc -c answer"
            )
            assert ran.ok, ran.error_text
        body = await sandbox.files.read("/workspace/body")
        assert [seen.body for seen in site.seen] == [body, body]


async def test_an_answer_that_ends_with_the_connection_passes_whole(site: Site) -> None:
    async with sandbox_to(site) as sandbox:
        assert "REACHED plain.test" in (await sandbox.run("curl -sS http://plain.test/to-the-end")).text


async def test_a_client_that_has_said_all_still_gets_its_answer(site: Site) -> None:
    program = """
import socket
connection = socket.create_connection(('plain.test', 80))
connection.sendall(b'GET /drip HTTP/1.1\\r\\nHost: plain.test\\r\\nConnection: close\\r\\n\\r\\n')
connection.shutdown(socket.SHUT_WR)
data = b''
while more := connection.recv(65536):
    data += more
print(data.decode())
"""
    async with sandbox_to(site) as sandbox:
        assert "REACHED plain.test" in (await sandbox.run([PYTHON, "-c", program])).text


_WEB_SOCKET = """
import socket, ssl, sys
host, port = sys.argv[1], int(sys.argv[2])
connection = socket.create_connection((host, port))
if port == 443:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = context.wrap_socket(connection, server_hostname=host)
wish = 'Connection: Upgrade\\r\\nUpgrade: websocket'
connection.sendall(f'GET /socket HTTP/1.1\\r\\nHost: {host}\\r\\n{wish}\\r\\n\\r\\n'.encode())
head = connection.recv(4096)
assert b' 101 ' in head, head
for word in (b'one', b'two', b'three'):
    connection.sendall(b'\\x81' + bytes([len(word)]) + word)
    print(connection.recv(4096)[2:].decode())
"""


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
    while data := await reader.read(4096):
        writer.write(data)
    writer.close()


@pytest.mark.parametrize("kind", ["plain", "over tls", "to the host of a secret"])
async def test_a_web_socket_passes(kind: str, tmp_path: Path) -> None:
    from skep.sandbox.egress.tls import Authority

    key, certificate = new_authority()
    trust = tmp_path / "trust.pem"
    trust.write_bytes(certificate)
    context = None if kind == "plain" else Authority(key, certificate).context("ws.test")
    server = await asyncio.start_server(_echo, "127.0.0.1", 0, ssl=context)
    upstreams = {"ws.test": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"}
    secrets = {"KEY": Secret("ws.test", "X-Key", fetched)} if "secret" in kind else {}
    network = Network.to("ws.test", upstreams=upstreams, secrets=secrets, trust=str(trust))
    async with server, Sandbox.create(network=network) as sandbox:
        ran = await sandbox.run([PYTHON, "-c", _WEB_SOCKET, "ws.test", "80" if kind == "plain" else "443"])
        assert ran.text.split() == ["one", "two", "three"], ran.error_text


async def test_a_server_may_speak_first_on_a_port_of_its_own() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        writer.write(b"250 " + await reader.readline())
        await writer.drain()
        writer.close()

    program = """
import socket
connection = socket.create_connection(('mail.test', 2525))
print(connection.recv(100).decode())
connection.sendall(b'EHLO me\\r\\n')
print(connection.recv(100).decode())
"""
    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    upstreams = {"mail.test": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"}
    async with server, Sandbox.create(network=Network.to("mail.test:2525", upstreams=upstreams)) as sandbox:
        ran = await sandbox.run([PYTHON, "-c", program])
        assert "220 hello" in ran.text
        assert "250 EHLO me" in ran.text


async def test_a_protocol_that_is_not_of_the_web_passes_on_a_port_of_its_own() -> None:
    async def pong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+PONG " + await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(pong, "127.0.0.1", 0)
    upstreams = {"db.test": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"}
    program = (
        "import socket; c = socket.create_connection(('db.test', 6379)); c.sendall(b'PING\\r\\n'); print(c.recv(99))"
    )
    async with server, Sandbox.create(network=Network.to("db.test:6379", upstreams=upstreams)) as sandbox:
        assert "+PONG PING" in (await sandbox.run([PYTHON, "-c", program])).text


async def test_names_are_answered_over_tcp_too(site: Site) -> None:
    program = """
import socket, struct
query = struct.pack('!HHHHHH', 9, 0x100, 1, 0, 0, 0) + b'\\x05plain\\x04test\\0' + struct.pack('!HH', 1, 1)
connection = socket.create_connection(('127.0.0.1', 53))
connection.sendall(struct.pack('!H', len(query)) + query)
print(socket.inet_ntoa(connection.recv(512)[-4:]))
"""
    async with sandbox_to(site) as sandbox:
        assert (await sandbox.run([PYTHON, "-c", program])).text.startswith("198.1")


async def test_a_host_that_does_not_answer_is_said_to(site: Site) -> None:
    async with sandbox_to(site, "gone.test") as sandbox:
        await sandbox.set_policy(parse_policy(["gone.test"], upstreams={"gone.test": "127.0.0.1:1"}))
        said = (await sandbox.run("curl -sS -m 10 http://gone.test/")).text
        assert "gone.test:80 does not answer (Connection refused)" in said


async def test_a_policy_can_open_another_port_while_the_sandbox_runs(site: Site) -> None:
    async with sandbox_to(site, "plain.test") as sandbox:
        assert not (await sandbox.run("curl -sS -m 5 http://plain.test:9999/")).ok
        await sandbox.set_policy(parse_policy(["plain.test:9999"], upstreams={"plain.test": site.address}))
        assert (await sandbox.run("curl -sS -m 5 http://plain.test:9999/")).ok
        assert "not on the allow-list" in (await sandbox.run("curl -sS -m 5 http://plain.test/")).text


async def test_a_large_upload_that_is_refused_still_reads_why(site: Site) -> None:
    async with sandbox_to(site) as sandbox:
        ran = await sandbox.run(
            "head -c 2000000 /dev/zero | curl -sS -m 10 -H 'Expect:' --data-binary @- http://no.test/"
        )
        assert "no.test:80 is not on the allow-list" in ran.text, ran.error_text


async def test_a_name_of_the_proxy_before_stands_for_nothing(site: Site) -> None:
    async with sandbox_to(site) as sandbox:
        before = (await sandbox.run("getent hosts plain.test")).text.split()[0]
        pid = gate().pid
        assert pid is not None
        os.kill(pid, 9)
        async with asyncio.timeout(5):
            while gate().pid in (None, pid):
                await asyncio.sleep(0.01)
        after = (await sandbox.run("getent hosts plain.test")).text.split()[0]
        assert after != before
        ran = await sandbox.run(f"curl -sS -m 5 -H 'Host: plain.test' http://{before}/")
        assert "is an address" in ran.text


async def test_a_proxy_that_cannot_start_is_said_with_its_reason() -> None:
    gate = Gate(["/bin/sh", "-c", "echo it has no legs >&2; exit 3"])
    passage = Passage(gate, "sandbox", Network.to("plain.test"), new_authority())
    with pytest.raises(SandboxUnusable, match="it has no legs"):
        await gate.add(passage)
    await gate.drop(passage)


async def test_a_proxy_that_keeps_dying_is_not_started_without_pause(tmp_path: Path) -> None:
    events: list[Event] = []
    count = tmp_path / "count"
    gate = Gate(["/bin/sh", "-c", f"echo . >> {count}; exit 3"])
    passage = Passage(gate, "sandbox", Network.to("plain.test", on_event=events.append), new_authority())
    with pytest.raises(SandboxUnusable):
        await gate.add(passage)
    async with asyncio.timeout(10):
        while len(events) < 3:
            await asyncio.sleep(0.01)
    assert len(count.read_text().split()) <= 4
    assert {event.kind for event in events} == {"proxy_lost"}
    await gate.drop(passage)


async def test_the_proxy_ends_with_the_last_sandbox(site: Site) -> None:
    async with sandbox_to(site), sandbox_to(site):
        pid = gate().pid
        assert pid is not None
    assert gate().pid is None
    assert not Path(f"/proc/{pid}").exists()


async def test_a_secret_without_certificates_to_check_is_refused_at_once() -> None:
    network = Network.to(secrets={"KEY": Secret("api.test", "X-Key", fetched)}, trust="/nonexistent/trust.pem")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        async with Sandbox.create(network=network):
            pass
