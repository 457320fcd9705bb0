"""The table of mechanisms, and how each is looked for: by asking, not by believing."""

from __future__ import annotations

import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skep.errors import InvalidRequest
from skep.sandbox import creation
from skep.sandbox.mechanisms import LEVELS, MECHANISMS, at_least, usable


class Engine(socketserver.StreamRequestHandler):
    """Says what it is as a Docker engine does, or what its server says instead."""

    def handle(self) -> None:
        asked = self.rfile.readline()
        answer: bytes = self.server.answer  # type: ignore[attr-defined]
        self.wfile.write(answer if asked.startswith(b"GET /info ") else b"HTTP/1.1 404 Not Found\r\n\r\n")


ABOUT = b'{"ServerVersion": "20.10.24", "Runtimes": {"runc": {}, "runsc": {}}}'
ALIVE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ABOUT), ABOUT)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[socketserver.UnixStreamServer]:
    with socketserver.UnixStreamServer(str(tmp_path / "engine.sock"), Engine) as server:
        server.answer = ALIVE  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_every_mechanism_that_can_be_made_has_its_place_in_the_table() -> None:
    assert set(MECHANISMS) | {"disabled"} == set(creation.MECHANISMS)
    assert all(one.needs and one.description and one.isolation in LEVELS for one in MECHANISMS.values())


def test_isolation_is_ordered_from_nothing_to_another_machine() -> None:
    assert at_least("kernel", "kernel") and at_least("machine", "namespaces")
    assert not at_least("namespaces", "kernel") and not at_least("none", "namespaces")
    order = [MECHANISMS[name].isolation for name in ("local", "bubblewrap", "gvisor", "e2b")]
    assert order == list(LEVELS)


def test_an_engine_is_asked_and_its_version_told(engine: socketserver.UnixStreamServer) -> None:
    found = usable("docker", {"host": f"unix://{engine.server_address!s}"})
    assert (found.usable, "20.10.24" in found.why, found.fix) == (True, True, "")


def test_a_runtime_that_an_engine_does_not_have_is_not_used(engine: socketserver.UnixStreamServer) -> None:
    host = f"unix://{engine.server_address!s}"
    assert usable("gvisor", {"engine": True, "host": host}).usable
    found = usable("docker", {"host": host, "runtime": "kata"})
    assert not found.usable and "kata" in found.why


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 500 Error\r\n\r\n", b"SSH-2.0-bees\r\n", b"HTTP/1.1 200 OK\r\n\r\n[]", b""]
)
def test_what_answers_without_being_an_engine_is_not_used(engine: socketserver.UnixStreamServer, answer: bytes) -> None:
    engine.answer = answer  # type: ignore[attr-defined]
    found = usable("docker", {"host": f"unix://{engine.server_address!s}"})
    assert not found.usable and found.fix


@pytest.mark.parametrize("host", ["unix:///nonexistent.sock", "tcp://127.0.0.1:1"])
def test_an_engine_that_is_not_there_is_named_with_a_fix(host: str) -> None:
    found = usable("docker", {"host": host})
    assert not found.usable and host in found.why and found.fix


def test_a_runsc_that_is_none_is_not_believed(tmp_path: Path) -> None:
    program = tmp_path / "runsc"
    program.write_text("#!/bin/sh\necho something else\n")
    program.chmod(0o755)
    assert not usable("gvisor", {"path": str(program)}).usable
    assert not usable("gvisor", {"path": str(tmp_path / "missing")}).usable
    program.write_text("#!/bin/sh\necho runsc version release-20990101.0\n")
    assert usable("gvisor", {"path": str(program)}).usable


@pytest.mark.parametrize(("name", "variable"), [("e2b", "E2B_API_KEY"), ("daytona", "DAYTONA_API_KEY")])
def test_a_cloud_needs_its_key_which_is_never_told(name: str, variable: str) -> None:
    pytest.importorskip(name)
    lacking = usable(name)
    assert not lacking.usable and variable in lacking.fix
    found = usable(name, {"api_key": "planted-secret"})
    assert found.usable and "planted-secret" not in repr(found)


def test_what_isolates_nothing_has_to_be_allowed() -> None:
    assert not usable("local").usable
    assert not usable("local", {"allow_unsafe": "yes"}).usable
    assert usable("local", {"allow_unsafe": True}).usable


def test_a_name_that_is_no_mechanism_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="magic"):
        usable("magic")


def test_the_table_brings_no_sdk_along() -> None:
    script = (
        "import sys, skep.sandbox.mechanisms; print({'docker', 'e2b', 'daytona', 'http.client'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
