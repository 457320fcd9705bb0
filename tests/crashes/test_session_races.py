"""Of controllers that want one key, exactly one acts; one that slept through a take-over writes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Ready
from tests.crashes.session_controller import eventually
from tests.sessions.yard import prepare_hive, prepare_home

from skep.sandbox.erase import erase

PROGRAM = Path(__file__).with_name("session_racer.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))}
#: How often the race is run. A file has one writer at a time: what can go wrong there shows soon.
ROUNDS = {"postgresql": 200, "sqlite": 60}
#: Long enough for a beat, short enough to be slept through.
TTL_S = 1.0


class Racer:
    """A controller in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, *words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def do(self, *words: str) -> Any:
        self.tell(*words)
        answer = self.hear()
        assert "did" in answer, answer
        return answer["did"]

    def sleep(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.await_sleep()

    def await_sleep(self) -> None:
        assert eventually(lambda: self._state() == "T", 30.0)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def racer(home: Path, url: str, host: str, ttl_s: float = 15.0) -> Iterator[Racer]:
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), str(home), url, host, str(ttl_s)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        running = Racer(process)
        try:
            assert running.hear() == {"did": "begin"}
            yield running
            process.communicate(timeout=60)
        finally:
            process.kill()


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Give the homes of two hosts that share a store of archives, and the key to it."""
    made = prepare_home(tmp_path / "one"), prepare_home(tmp_path / "two")
    for home in made:
        (home / "keys").mkdir(mode=0o700)
        (home / "keys" / "archive.key").write_bytes(bytes(range(32)))
        (home / "keys" / "archive.key").chmod(0o600)
    yield made
    for home in made:
        erase(str(home), home.stat().st_ino)


@pytest.fixture
def shared(ready_postgres: Ready) -> Iterator[str]:
    """Give the database of two hosts: a file is of one host alone."""
    with ready_postgres.lent() as url:
        asyncio.run(prepare_hive(url, threads="thread"))
        yield url


@pytest.fixture
def url(ready_url: str) -> str:
    asyncio.run(prepare_hive(ready_url, threads="thread"))
    return ready_url


@pytest.mark.timeout(300)
def test_of_two_that_race_one_key_one_acts_and_both_get_the_same_computer(homes: tuple[Path, Path], url: str) -> None:
    with racer(homes[0], url, "host") as one, racer(homes[0], url, "host") as other:
        for number in range(ROUNDS[url.partition(":")[0]]):
            thread = f"cli:{number // 20}"  # one race in twenty is over a key that nobody has used
            for each in (one, other):
                each.tell("resolve", thread)
            first, second = one.hear()["did"], other.hear()["did"]
            assert first["id"] == second["id"]
            assert first["token"] == second["token"]
            assert {first["joined"], second["joined"]} == {True, False}
            for each in (one, other):
                each.tell("look", thread)
            found = [each.hear()["did"] for each in (one, other)]
            assert found[0] == found[1]
            assert found[0]["sandboxes"] == 1
            assert {f"mark-{each.process.pid}" for each in (one, other)} <= {*found[0]["files"]}
            for each in (one, other):
                each.tell("leave")
            assert [each.hear() for each in (one, other)] == [{"did": None}] * 2
        assert one.do("show", "cli:0")["generation"] == 20


@pytest.mark.service
def test_who_slept_past_its_lease_writes_nothing_any_more(homes: tuple[Path, Path], shared: str) -> None:
    """The other host cannot see whether the sleeper lives. It takes over, and says that the files are elsewhere."""
    with racer(homes[0], shared, "one", TTL_S) as sleeper, racer(homes[1], shared, "two") as other:
        sleeper.do("run", "cli:x", "echo kept > work")
        sleeper.sleep()
        other.tell("resolve", "cli:x")
        taken = other.hear()
        assert taken["error"] == "WorkspaceDamaged" and "missing from one" in taken["message"]
        before = other.do("show", "cli:x")
        sleeper.wake()
        sleeper.tell("write", "cli:x")
        assert sleeper.hear()["error"] == "LeaseLost"
        assert other.do("show", "cli:x") == before
        assert sleeper.do("run", "cli:x", "cat work") == "kept\n"


@pytest.mark.service
def test_who_kept_its_lease_writes(homes: tuple[Path, Path], shared: str) -> None:
    """Control: without a take-over the same write is taken."""
    with racer(homes[0], shared, "one", TTL_S) as sleeper:
        sleeper.do("resolve", "cli:x")
        sleeper.sleep()
        sleeper.wake()
        sleeper.do("write", "cli:x")
        assert sleeper.do("show", "cli:x")["last_error"] == "written late"


@pytest.mark.service
def test_who_slept_while_archiving_frees_its_own_folder_and_nothing_else(homes: tuple[Path, Path], shared: str) -> None:
    with racer(homes[0], shared, "one", TTL_S) as sleeper, racer(homes[1], shared, "two") as other:
        sleeper.do("run", "cli:x", "echo kept > work")
        sleeper.tell("archive", "cli:x")
        sleeper.await_sleep()
        assert other.do("run", "cli:x", "cat work; echo more >> work") == "kept\n"
        before = other.do("show", "cli:x")
        assert (before["status"], before["host"]) == ("active", "two")
        sleeper.wake()
        assert sleeper.hear()["error"] == "LeaseLost"
        assert not sleeper.do("show", "cli:x")["here"]
        assert other.do("show", "cli:x") == before
        assert other.do("run", "cli:x", "cat work") == "kept\nmore\n"


@pytest.mark.service
def test_a_computer_that_another_process_has_joined_can_still_be_stopped(homes: tuple[Path, Path], shared: str) -> None:
    with (
        racer(homes[0], shared, "host") as holder,
        racer(homes[0], shared, "host") as guest,
        racer(homes[0], shared, "host") as third,
    ):
        holder.do("run", "cli:x", "echo kept > work")
        assert guest.do("resolve", "cli:x")["joined"]
        assert third.do("stop", "cli:x") == "stopped"
        assert guest.do("run", "cli:x", "cat work") == "kept\n"
        assert holder.do("resolve", "cli:x")["joined"]
        for each in (holder, third, guest):
            each.do("leave")
