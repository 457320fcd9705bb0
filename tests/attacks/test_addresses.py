"""Where a name may lead: to public addresses of other machines, and nowhere else, however they are spelled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.attack import outcome_in
from tests.attacks.reach import HOST_NETWORK, Reach, network
from tests.sandbox.egress.site import running_site

from skep.sandbox.binary import Bwrap
from skep.sandbox.sandbox import Sandbox

SPELLINGS = [
    "127.0.0.1", "2130706433", "0177.0.0.1", "0x7f.1", "127.1", "0x7f000001", "017700000001", "0", "::ffff:127.0.0.1",
    "localhost",
]  # fmt: skip
#: Hosts by what their name leads to.
FORBIDDEN = {
    "loopback.test": "127.0.0.1",
    "nowhere.test": "0.0.0.0",
    "private-10.test": "10.1.2.3",
    "private-172.test": "172.16.5.4",
    "private-192.test": "192.168.1.1",
    "metadata.test": "169.254.169.254",
    "carrier.test": "100.64.1.1",
    "alibaba.test": "100.100.100.200",
    "azure.test": "168.63.129.16",
    "oracle.test": "192.0.0.192",
    "benchmark.test": "198.18.0.9",
    "loopback-6.test": "::1",
    "unique-local.test": "fd00:ec2::254",
    "site-local.test": "fec0::1",
    "mapped.test": "::ffff:169.254.169.254",
    "compatible.test": "::127.0.0.1",
    "nat64.test": "64:ff9b::a9fe:a9fe",
    "local-nat64.test": "64:ff9b:1::a9fe:a9fe",
    "6to4.test": "2002:a9fe:a9fe::1",
    "teredo.test": "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "this-machine.test": "93.184.216.34",
    "this-machine-6.test": "2606:2800:220:1::1",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_an_address_is_refused_in_every_spelling(spelling: str, outside: Path) -> None:
    host = f"[{spelling}]" if ":" in spelling else spelling
    attempt = f"""
        connection = socket.create_connection(({spelling!r}, PORT), 5)
        connection.sendall(b'GET / HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n')
        reached(read(connection, b'REACHED'), b'REACHED')
        """
    async with running_site() as site, Sandbox.create(network=network(site)) as sandbox:
        reach = Reach(spelling, attempt)
        control = await HOST_NETWORK.outcome(reach.text(site, port=site.port), outside)
        assert control.through, control.said
        for port in (80, site.port):
            ours = await outcome_in(sandbox, reach.text(None, port=port))
            assert not ours.through, ours.said
        assert len(site.seen) == 1


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Try all the names once, in one namespace."""
    answers = {name: [address] for host, address in FORBIDDEN.items() for name in (host, f"naive-{host}")}
    return in_namespace("names", answers, [*FORBIDDEN], tmp_path_factory.mktemp("names"))


@pytest.mark.parametrize("host", FORBIDDEN)
def test_a_name_that_leads_to_an_address_of_no_stranger_is_not_dialled(host: str, results: dict[str, Any]) -> None:
    result = results[host]
    assert result["naive"], "the control does not reach the address, so the refusal shows nothing"
    assert not result["ours"]
    assert "not a public address" in result["why"]
    assert result["public"] is host.startswith("this-machine")


def test_the_address_that_was_checked_is_the_one_that_is_dialled(tmp_path: Path) -> None:
    answers = {name: ["93.184.216.34", "127.0.0.1"] for name in ("rebound.test", "naive-rebound.test")}
    result = in_namespace("rebinding", answers, ["rebound.test"], tmp_path)["rebound.test"]
    assert result["naive"], "the control is not led to loopback by the second answer"
    assert not result["ours"]
    assert result["asked"] == 1
    assert "does not answer" in result["why"]


def in_namespace(kind: str, answers: dict[str, list[str]], hosts: list[str], folder: Path) -> dict[str, Any]:
    """Try names in a network namespace whose name server gives these answers."""
    resolver = folder / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\n")
    program = [sys.executable, "-P", str(Path(__file__).with_name("in_namespace.py"))]
    ran = subprocess.run(
        [
            Bwrap.find().path, "--unshare-user", "--unshare-net", "--uid", "0", "--gid", "0", "--cap-add", "ALL",
            "--bind", "/", "/", "--ro-bind", resolver, os.path.realpath("/etc/resolv.conf"), "--dev", "/dev",
            "--proc", "/proc", *program, kind, json.dumps(answers), json.dumps(hosts),
        ],
        capture_output=True, text=True, timeout=30, check=False,
        env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout)
    return result
