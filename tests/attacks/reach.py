"""Attempts to reach somebody over the network, as data, each with a control."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.attacks.attack import Outcome, Plain, outcome_in, program
from tests.sandbox.egress.site import Site

from skep.sandbox.egress.network import Event, Network
from skep.sandbox.egress.policy import Traffic
from skep.sandbox.sandbox import Sandbox

#: A plain bwrap in the host's own network.
HOST_NETWORK = Plain(namespaces=("--unshare-pid",))
ALLOWED = ("allowed.test", "allowed.test:8080", "*.wild.test")

_TOOLS = """
import ssl
READ_S = 4.0

def tcp(name, port):
    return socket.create_connection(MAP.get((name, port), (name, port)), 5)

def read(connection, wanted=b'REACHED denied', limit=1 << 20):
    connection.settimeout(READ_S)
    data = b''
    try:
        while wanted not in data and len(data) < limit and (more := connection.recv(65536)):
            data += more
    except (TimeoutError, ConnectionResetError):
        pass
    return data

def ask(data, name='allowed.test', port=80, wanted=b'REACHED denied'):
    connection = tcp(name, port)
    connection.sendall(data)
    return read(connection, wanted)

def tls(connection, name):
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(connection, server_hostname=name)

def by_proxy(target):
    connection = tcp('127.0.0.1', 3128)
    connection.sendall(f'CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n'.encode())
    said = connection.recv(65536)
    assert said.startswith(b'HTTP/1.1 200'), said
    return connection

GET = b'GET /%b HTTP/1.1\\r\\nHost: %b\\r\\n\\r\\n'
DENIED = GET % (b'smuggled', b'denied.test')

def reached(data, mark=b'REACHED denied'):
    assert mark in data, data

def ask_on(connection, data, wanted=b'REACHED denied'):
    connection.sendall(data)
    return read(connection, wanted)

def say(connection):
    connection.sendall(DENIED)
    return connection

def through(target):
    name, _, port = target.partition(':')
    return tcp(name, int(port)) if MAP else by_proxy(target)
"""


@dataclass(frozen=True, slots=True)
class Reach:
    """An attempt to reach somebody. With `opened` the control is a sandbox that may; without, the host's network."""

    name: str
    attempt: str
    opened: tuple[str, ...] = ()
    #: Where a port of the attempt is in the control: "plain" or "tls".
    ports: dict[int, str] = field(default_factory=lambda: {80: "plain", 443: "tls", 8080: "plain"})

    def text(self, site: Site | None, *, port: int = 0) -> str:
        where = {} if site is None else self._map(site)
        tools = textwrap.dedent(_TOOLS)
        return program(f"{tools}\n{textwrap.dedent(self.attempt).strip()}", MAP=where, PORT=port)

    def _map(self, site: Site) -> dict[tuple[str, int], tuple[str, int]]:
        names = ("allowed.test", "denied.test")
        places = {"plain": site.port, "tls": site.tls_port}
        return {(name, port): ("127.0.0.1", places[kind]) for name in names for port, kind in self.ports.items()}


def network(site: Site, *more: str, events: list[Event] | None = None, traffic: Traffic | None = None) -> Network:
    """Allow what the tests allow, and pin every name of theirs to the server: whatever gets through arrives."""
    names = (
        "allowed.test", "denied.test", "evil-allowed.test", "allowed.test.evil.test", "allowedxtest.test", "wild.test",
        "evilwild.test", "xn--llowed-4fg.test", "deep.er.wild.test", "allowed.test.denied.test",
    )  # fmt: skip
    upstreams = dict.fromkeys(names, site.address) | {"tls.test": site.tls_address, "secure.test": site.tls_address}
    heard = events.append if events is not None else None
    return Network.to(*ALLOWED, "secure.test", *more, upstreams=upstreams, on_event=heard, traffic=traffic)


def expand(attacks: Sequence[Reach]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("reach", attacks, ids=lambda reach: reach.name)


async def is_held(reach: Reach, site: Site, folder: Path) -> None:
    """Assert that the attempt gets through where it may, and not where it may not."""
    async with Sandbox.create(network=network(site)) as sandbox:
        control = await _control(reach, site, folder)
        assert control.through, f"the control is held, so the attempt shows nothing: {control.said}"
        site.seen.clear()
        ours = await outcome_in(sandbox, reach.text(None, port=site.port))
        assert not ours.through, f"{reach.name} got through: {ours.said}"
        assert not [seen for seen in site.seen if seen.host.partition(":")[0] != "allowed.test"], "the server saw it"


async def _control(reach: Reach, site: Site, folder: Path) -> Outcome:
    if not reach.opened:
        return await HOST_NETWORK.outcome(reach.text(site, port=site.port), folder)
    async with Sandbox.create(network=network(site, *reach.opened)) as open_sandbox:
        return await outcome_in(open_sandbox, reach.text(None, port=site.port))
