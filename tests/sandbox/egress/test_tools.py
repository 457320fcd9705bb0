"""The programs that people use reach what is allowed, whether they know of the proxy or not, and are told the rest."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.sandbox.egress.mirror import GIT_BACKEND, running_mirror

from skep.sandbox.egress.network import Event, Network
from skep.sandbox.egress.tls import new_authority
from skep.sandbox.sandbox import Execution, Sandbox

TIMEOUT_S = 60.0
PROXY = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:3128")
#: Where programs look for the certificates of a mirror with an authority of its own.
TRUSTING = (
    "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "npm_config_cafile",
)  # fmt: skip
_UV = shutil.which("uv") or str(Path(sys.executable).parent / "uv")


@dataclass(frozen=True, slots=True)
class Tool:
    """A program, the command that gets something with it, and what shows that it got it. {url} is the mirror's."""

    name: str
    needs: str
    command: str
    shows: str
    answer: str
    #: What it says of a host that is not allowed. Not every program repeats what a server says.
    refused: str = "Skep blocked this request: elsewhere.test:80 is not on the allow-list"


TOOLS = [
    Tool(
        "pip", "/usr/bin/pip",
        "pip install -vv --no-cache-dir --disable-pip-version-check --retries 0 --trusted-host {host} --target lib"
        " --index-url {url}/simple/ tinypkg",
        "PYTHONPATH=lib python3 -c 'import tinypkg; print(tinypkg.ANSWER)'", "42",
    ),
    Tool(
        "uv", _UV,
        "/opt/uv/uv pip install -q --no-cache --python /usr/bin/python3 --allow-insecure-host {host} --target lib"
        " --index-url {url}/simple/ tinypkg",
        "PYTHONPATH=lib python3 -c 'import tinypkg; print(tinypkg.ANSWER)'", "42",
        "(http://elsewhere.test/simple/) returned a 403 Forbidden error",
    ),
    Tool(
        "npm", "/usr/bin/npm",
        "npm install --no-audit --no-fund --fetch-retries 0 --cache /tmp/npm --registry {url}/ tinypkg",
        "node -e 'console.log(require(\"tinypkg\"))'", "42",
    ),
    Tool("git", str(GIT_BACKEND), "git clone -q {url}/repo.git", "git -C repo log --format=%s", "first"),
]  # fmt: skip


#: A sandbox that may reach a mirror, the names that the mirror was asked for by, and what the proxy told.
Mirrored = tuple[Sandbox, list[str], list[Event]]


@pytest.fixture
async def mirrored(tmp_path: Path) -> AsyncIterator[Mirrored]:
    authority = new_authority()
    with running_mirror(tmp_path, authority, "tls-mirror.test") as mirror:
        upstreams = {
            "mirror.test": f"127.0.0.1:{mirror.port}",
            "elsewhere.test": f"127.0.0.1:{mirror.port}",
            "tls-mirror.test": f"127.0.0.1:{mirror.tls_port}",
            "tls-elsewhere.test": f"127.0.0.1:{mirror.tls_port}",
        }
        shown = {str(Path(_UV).resolve().parent): "/opt/uv"} if Path(_UV).is_file() else {}
        events: list[Event] = []
        network = Network.to("mirror.test", "tls-mirror.test", upstreams=upstreams, on_event=events.append)
        async with Sandbox.create(network=network, read_only=shown) as sandbox:
            await sandbox.files.write("/workspace/ca.pem", authority[1])
            yield sandbox, mirror.hosts, events


async def attempt(sandbox: Sandbox, tool: Tool, host: str, *, tls: bool, env: dict[str, str]) -> Execution:
    command = tool.command.format(url=f"{'https' if tls else 'http'}://{host}", host=host)
    trusting = dict.fromkeys(TRUSTING, "/workspace/ca.pem") if tls else {}
    return await sandbox.run(command, env={**trusting, **env}, timeout_s=TIMEOUT_S)


def _require(path: str) -> None:
    if not Path(path).exists():
        missing = f"{path} is not installed; install it to run this test"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("env", [{}, PROXY], ids=["transparent", "proxy variables"])
async def test_it_gets_what_is_allowed(tool: Tool, tls: bool, env: dict[str, str], mirrored: Mirrored) -> None:
    _require(tool.needs)
    sandbox, hosts, _ = mirrored
    ran = await attempt(sandbox, tool, "tls-mirror.test" if tls else "mirror.test", tls=tls, env=env)
    assert ran.ok, ran.text + ran.error_text
    assert (await sandbox.run(tool.shows)).text.strip() == tool.answer
    assert hosts


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
@pytest.mark.parametrize("env", [{}, PROXY], ids=["transparent", "proxy variables"])
async def test_it_is_told_what_is_not(tool: Tool, env: dict[str, str], mirrored: Mirrored) -> None:
    """The mirror is there under that name too: only the allow-list keeps it away."""
    _require(tool.needs)
    sandbox, hosts, events = mirrored
    ran = await attempt(sandbox, tool, "elsewhere.test", tls=False, env=env)
    assert not ran.ok
    assert not hosts
    said = " ".join((ran.text + ran.error_text).split())
    assert tool.refused in said, said
    assert {event.details["reason"] for event in events} == {
        "elsewhere.test:80 is not on the allow-list of this sandbox"
    }


async def test_a_refusal_over_tls_says_who_is_allowed(mirrored: Mirrored) -> None:
    sandbox, hosts, _ = mirrored
    ran = await sandbox.run("curl -sS -m 10 https://tls-elsewhere.test/")
    assert "Skep blocked this request: tls-elsewhere.test:443 is not on the allow-list" in ran.text
    assert "Allowed are: mirror.test, tls-mirror.test" in ran.text
    assert not hosts


_H2_SERVER = """
const http2 = require('http2'), fs = require('fs')
const pem = fs.readFileSync(0)
const server = http2.createSecureServer({key: pem, cert: pem})
server.on('stream', stream => { stream.respond({':status': 200}); stream.end('over two') })
server.listen(0, '127.0.0.1', () => console.log(server.address().port))
"""


async def test_http_2_passes_over_tls() -> None:
    _require("/usr/bin/node")
    from skep.sandbox.egress.tls import Authority

    with tempfile.TemporaryFile() as pem:
        pem.write(Authority(*new_authority())._issue("h2.test"))
        pem.seek(0)
        server = await asyncio.create_subprocess_exec(
            "/usr/bin/node", "-e", _H2_SERVER, stdin=pem, stdout=subprocess.PIPE
        )
    try:
        assert server.stdout is not None
        port = int(await asyncio.wait_for(server.stdout.readline(), 20))
        network = Network.to("h2.test", upstreams={"h2.test": f"127.0.0.1:{port}"})
        async with Sandbox.create(network=network) as sandbox:
            ran = await sandbox.run("curl -sSk -m 10 --http2 https://h2.test/ -w ' %{http_version}'")
            assert ran.text == "over two 2"
    finally:
        server.kill()
        await server.wait()
