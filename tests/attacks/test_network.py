"""What a command can do to reach a host that it is not allowed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.attacks.reach import Reach, expand, is_held
from tests.sandbox.egress.site import Site, running_site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


def to(host: str, *, name: str | None = None) -> str:
    """Write an attempt to get a page from a host."""
    return f"reached(ask(GET % (b'', b'{host}'), '{name or host}', wanted=b'REACHED'), b'REACHED {host}')"


def raw(data: str, port: int = 80) -> str:
    """Write an attempt that sends bytes to the allowed host, to be understood as a request for the other."""
    return f"reached(ask({data}, port={port}))"


NAMES = [
    Reach("a host that is not allowed", to("denied.test"), opened=("denied.test",)),
    Reach("a name that ends like an allowed one", to("evil-allowed.test"), opened=("evil-allowed.test",)),
    Reach("a name that begins like an allowed one", to("allowed.test.evil.test"), opened=("*.evil.test",)),
    Reach("a name with another letter for the dot", to("allowedxtest.test"), opened=("allowedxtest.test",)),
    Reach("the parent of a wildcard", to("wild.test"), opened=("wild.test",)),
    Reach("a name that ends like a wildcard", to("evilwild.test"), opened=("evilwild.test",)),
    Reach("a look-alike in another script", to("xn--llowed-4fg.test"), opened=("xn--llowed-4fg.test",)),
    Reach("an allowed name as a label of another", to("allowed.test.denied.test"), opened=("*.denied.test",)),
    Reach("upper case and a final dot", to("DENIED.test."), opened=("denied.test",)),
    Reach(
        "another port of an allowed host",
        "reached(ask(GET % (b'', b'allowed.test:8081'), port=8081, wanted=b'REACHED'), b'REACHED allowed')",
        opened=("allowed.test:8081",),
    ),
    Reach(
        "a redirect from an allowed host",
        """
        import urllib.request, urllib.error
        try:
            reached(urllib.request.urlopen('http://allowed.test/redirect', timeout=5).read())
        except urllib.error.HTTPError as refused:
            raise OSError(refused.read())
        """,
        opened=("denied.test",),
    ),
    Reach(
        "a client that honours no proxy",
        """
        import subprocess
        env = {'NO_PROXY': '*', 'no_proxy': '*', 'PATH': '/usr/bin'}
        reached(subprocess.run(['curl', '-s', '-m', '5', 'http://denied.test/'], capture_output=True, env=env).stdout)
        """,
        opened=("denied.test",),
    ),
    Reach(
        "a client that honours a proxy",
        """
        import subprocess
        env = {'http_proxy': 'http://127.0.0.1:3128', 'PATH': '/usr/bin'}
        reached(subprocess.run(['curl', '-s', '-m', '5', 'http://denied.test/'], capture_output=True, env=env).stdout)
        """,
        opened=("denied.test",),
    ),
]

PROXY = [
    Reach("CONNECT to another host", "reached(read(say(by_proxy('denied.test:80'))))", opened=("denied.test",)),
    Reach(
        "CONNECT to another port of an allowed host",
        "by_proxy('allowed.test:8081')",
        opened=("allowed.test:8081",),
    ),
    Reach(
        "CONNECT and then another host by HTTP",
        "reached(ask_on(through('allowed.test:80'), DENIED))",
    ),
    Reach(
        "CONNECT and then another host by TLS",
        "reached(ask_on(tls(through('allowed.test:443'), 'denied.test'), DENIED))",
    ),
    Reach(
        "an address written out to the proxy",
        """
        connection = tcp('127.0.0.1', 3128) if not MAP else tcp('allowed.test', 80)
        reached(ask_on(connection, b'GET http://denied.test/ HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n'))
        """,
    ),
    Reach(
        "a second request to the proxy for another host",
        """
        connection = tcp('127.0.0.1', 3128)
        ask_on(connection, b'GET http://allowed.test/ HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n', b'allowed')
        reached(ask_on(connection, b'GET http://denied.test/ HTTP/1.1\\r\\nHost: denied.test\\r\\n\\r\\n'))
        """,
        opened=("denied.test",),
    ),
    Reach(
        "CONNECT to an address of the host",
        """
        connection = through('127.0.0.1:%d' % PORT) if not MAP else socket.create_connection(('127.0.0.1', PORT), 5)
        reached(ask_on(connection, DENIED))
        """,
    ),
]

HOSTS = [
    Reach("another Host than the name", raw("DENIED")),
    Reach("two Hosts", raw("b'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\nHost: denied.test\\r\\n\\r\\n'")),
    Reach(
        "an address in full with an allowed Host",
        raw("b'GET http://denied.test/ HTTP/1.1\\r\\nHost: allowed.test\\r\\n\\r\\n'"),
    ),
    Reach("no Host at all", "reached(ask(b'GET / HTTP/1.1\\r\\n\\r\\n', wanted=b'REACHED'), b'REACHED nobody')"),
    Reach("a folded Host", raw("b'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\n Host: denied.test\\r\\n\\r\\n'")),
    Reach(
        "a Host behind a bare line feed",
        raw("b'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\nX: a\\nHost: denied.test\\r\\n\\r\\n'"),
    ),
    Reach("a request behind an allowed one", raw("GET % (b'', b'allowed.test') + DENIED")),
    Reach("a request behind a refused one", raw("DENIED + DENIED")),
    Reach(
        "another name in TLS than was looked up",
        "reached(ask_on(tls(tcp('allowed.test', 443), 'denied.test'), DENIED))",
    ),
    Reach(
        "an allowed name in TLS to the address of another",
        "reached(ask_on(tls(tcp('denied.test', 443), 'allowed.test'), DENIED))",
    ),
    Reach("TLS that names nobody", "reached(ask_on(tls(tcp('allowed.test', 443), None), DENIED))"),
    Reach(
        "an HTTP/2 preface", "reached(ask(b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n', wanted=b'h2'), b'REACHED h2')"
    ),
    Reach(
        "an HTTP/2 preface on a port of its own",
        "reached(ask(b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n', port=8080, wanted=b'h2'), b'REACHED h2')",
    ),
    Reach("a Host on a port of its own", raw("DENIED", 8080)),
    Reach("an empty line before the request, on a port of its own", raw("b'\\r\\n' + DENIED", 8080)),
    Reach("a method in small letters, on a port of its own", raw("b'g' + DENIED[1:]", 8080)),
    Reach(
        "silence before the request, on a port of its own",
        """
        connection = tcp('allowed.test', 8080)
        time.sleep(0.8)
        reached(ask_on(connection, DENIED))
        """,
    ),
    Reach(
        "half a line before the request, on a port of its own",
        """
        connection = tcp('allowed.test', 8080)
        connection.sendall(DENIED[:2])
        time.sleep(0.8)
        reached(ask_on(connection, DENIED[2:]))
        """,
    ),
]

SMUGGLED = [
    Reach(
        "a length and chunks",
        raw(
            "b'POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nContent-Length: 0\\r\\n'"
            " + b'Transfer-Encoding: chunked\\r\\n\\r\\n'"
            " + b'%x\\r\\n%b\\r\\n0\\r\\n\\r\\n' % (len(DENIED), DENIED)"
        ),
    ),
    Reach(
        "two lengths",
        raw(
            "b'POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nContent-Length: %d\\r\\nContent-Length: 0\\r\\n\\r\\n%b'"
            " % (len(DENIED), DENIED)"
        ),
    ),
    Reach(
        "chunks of another encoding",
        raw(
            "b'POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nTransfer-Encoding: xchunked\\r\\n\\r\\n'"
            " + b'%x\\r\\n%b\\r\\n0\\r\\n\\r\\n' % (len(DENIED), DENIED)"
        ),
    ),
    Reach(
        "chunks in a version without them",
        raw(
            "b'POST / HTTP/1.0\\r\\nHost: allowed.test\\r\\nConnection: keep-alive\\r\\n'"
            " + b'Transfer-Encoding: chunked\\r\\n\\r\\n'"
            " + b'%x\\r\\n%b\\r\\n0\\r\\n\\r\\n' % (len(DENIED), DENIED)"
        ),
    ),
    Reach(
        "a blank before the colon",
        raw(
            "b'POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nTransfer-Encoding : chunked\\r\\n\\r\\n'"
            " + b'%x\\r\\n%b\\r\\n0\\r\\n\\r\\n' % (len(DENIED), DENIED)"
        ),
    ),
    Reach(
        "a line feed in the extension of a chunk",
        raw(
            "b'POST / HTTP/1.1\\r\\nHost: allowed.test\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n'"
            " + b'5;\\nfoo\\r\\n0\\r\\n\\r\\n\\r\\n' + b'%x\\r\\n%b\\r\\n0\\r\\n\\r\\n' % (len(DENIED), DENIED)"
        ),
    ),
    Reach(
        "another protocol that the host does not take up",
        raw(
            "b'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\nConnection: upgrade\\r\\n'"
            " + b'Upgrade: websocket\\r\\n\\r\\n' + DENIED"
        ),
    ),
    Reach(
        "another protocol than WebSocket",
        raw(
            "b'GET /upgrade HTTP/1.1\\r\\nHost: allowed.test\\r\\nConnection: upgrade\\r\\n'"
            " + b'Upgrade: h2c\\r\\n\\r\\n' + DENIED"
        ),
    ),
]


@expand(NAMES)
async def test_a_name_that_no_rule_covers_is_not_reached(reach: Reach, site: Site, outside: Path) -> None:
    await is_held(reach, site, outside)


@expand(PROXY)
async def test_a_client_that_asks_the_proxy_gets_no_further(reach: Reach, site: Site, outside: Path) -> None:
    await is_held(reach, site, outside)


@expand(HOSTS)
async def test_whom_a_connection_was_allowed_for_is_whom_it_gets(reach: Reach, site: Site, outside: Path) -> None:
    await is_held(reach, site, outside)


@expand(SMUGGLED)
async def test_no_request_hides_in_another(reach: Reach, site: Site, outside: Path) -> None:
    await is_held(reach, site, outside)
