"""When the egress proxy is killed with -9, connections fail, nothing leaks, and another is there within two seconds."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.sandbox.egress.site import Site, running_site

from skep.sandbox.egress.gate import gate
from skep.sandbox.egress.network import Event, Network, Secret
from skep.sandbox.log import Log
from skep.sandbox.sandbox import Sandbox

BACK_S = 2.0
#: Keeps asking until told to stop, and says of each answer whether it came.
_TRAFFIC = """
import os, socket, time
print('begun', flush=True)
while not os.path.exists('/workspace/stop'):
    try:
        connection = socket.create_connection(('allowed.test', 80), 2)
        connection.sendall(b'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\nConnection: close\\r\\n\\r\\n')
        data = b''
        while more := connection.recv(65536):
            data += more
        print('answered' if b'REACHED allowed.test' in data else 'cut', flush=True)
        connection.close()
    except OSError:
        print('failed', flush=True)
        time.sleep(0.005)
"""


def _network(site: Site, events: list[Event]) -> Network:
    upstreams = {"allowed.test": site.address, "denied.test": site.address}
    return Network.to("allowed.test", upstreams=upstreams, on_event=events.append)


async def _another(pid: int | None) -> int:
    """Wait for a proxy that is not the one given."""
    async with asyncio.timeout(BACK_S):
        while (now := gate().pid) is None or now == pid:
            await asyncio.sleep(0.005)
        return now


async def test_traffic_fails_while_it_is_gone_and_goes_on_after() -> None:
    events: list[Event] = []
    async with running_site() as site, Sandbox.create(network=_network(site, events)) as sandbox:
        job = await sandbox.background(["/usr/bin/python3", "-c", _TRAFFIC])
        for _ in range(3):
            pid = gate().pid
            assert pid is not None
            await _more(job.log, b"answered")
            os.kill(pid, signal.SIGKILL)
            await _another(pid)
            async with asyncio.timeout(BACK_S):
                ran = await sandbox.run(
                    "curl -sS -m 2 --retry 20 --retry-all-errors --retry-delay 0 http://allowed.test/"
                )
            assert "REACHED allowed.test" in ran.text
            await _more(job.log, b"answered")
        await sandbox.files.write("/workspace/stop", b"")
        await job.wait()
        assert [event.kind for event in events].count("proxy_lost") == 3
        assert {seen.host for seen in site.seen} == {"allowed.test"}


async def _more(log: Log, word: bytes) -> None:
    """Wait until a word is said once more."""
    before = log.read().data.count(word)
    async with asyncio.timeout(10):
        while log.read().data.count(word) <= before:
            await asyncio.sleep(0.005)


async def test_a_download_under_way_is_cut_and_not_taken_for_whole() -> None:
    events: list[Event] = []
    async with running_site() as site, Sandbox.create(network=_network(site, events)) as sandbox:
        running = asyncio.ensure_future(sandbox.run("curl -sS -m 20 http://allowed.test/promised -o file"))
        pid = gate().pid
        assert pid is not None
        async with asyncio.timeout(10):
            while not site.seen:
                await asyncio.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        assert not (await running).ok
        await _another(pid)


async def test_nothing_gets_out_to_others_at_any_moment() -> None:
    """Attempts on a host that is not allowed go on all the while, over several deaths."""
    program = _TRAFFIC.replace("allowed.test", "denied.test")
    events: list[Event] = []
    async with running_site() as site, Sandbox.create(network=_network(site, events)) as sandbox:
        job = await sandbox.background(["/usr/bin/python3", "-c", program])
        for _ in range(3):
            pid = gate().pid
            assert pid is not None
            await _more(job.log, b"cut")
            os.kill(pid, signal.SIGKILL)
            await _another(pid)
        await sandbox.files.write("/workspace/stop", b"")
        await job.wait()
        assert b"answered" not in job.log.read().data
        assert not site.seen


async def test_a_secret_still_goes_in_after_it_came_back(tmp_path: Path) -> None:
    async def fetch() -> str:
        return "the-value-of-the-secret"

    async with running_site(name="api.test") as site:
        trust = tmp_path / "trust.pem"
        trust.write_bytes(site.trust)
        network = Network.to(
            upstreams={"api.test": site.tls_address},
            secrets={"KEY": Secret("api.test", "Authorization", fetch)},
            trust=str(trust),
        )
        async with Sandbox.create(network=network) as sandbox:
            for _ in range(2):
                pid = gate().pid
                assert pid is not None
                ran = await sandbox.run('curl -sS -m 5 https://api.test/ -H "Authorization: $KEY"')
                assert ran.ok, ran.error_text
                assert b"the-value-of-the-secret" in site.seen[-1].head
                os.kill(pid, signal.SIGKILL)
                await _another(pid)


@pytest.mark.parametrize("sandboxes", [8])
async def test_every_sandbox_gets_its_own_way_back(sandboxes: int) -> None:
    async with running_site() as site:
        names = [f"host-{number}.test" for number in range(sandboxes)]
        made = [
            await Sandbox.create(network=Network.to(name, upstreams=dict.fromkeys(names, site.address)))
            for name in names
        ]
        try:
            pid = gate().pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await _another(pid)
            for number, sandbox in enumerate(made):
                own, other = names[number], names[number - 1]
                assert f"REACHED {own}" in (await sandbox.run(f"curl -sS -m 5 http://{own}/")).text
                assert "not on the allow-list" in (await sandbox.run(f"curl -sS -m 5 http://{other}/")).text
        finally:
            for sandbox in made:
                await sandbox.stop()
