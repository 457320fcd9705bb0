"""Machines of Daytona beyond the contract: what is kept, found again, refused, told, and never sent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.clouds.daytona.cloud import ROOT, Cloud, served

from skep.errors import (
    Conflict,
    Denied,
    InvalidRequest,
    LimitReached,
    NotFound,
    SandboxLost,
    SandboxUnusable,
    SkepError,
    Unavailable,
)
from skep.sandbox.creation import Creation
from skep.sandbox.daytona import DaytonaSandbox
from skep.sandbox.egress.network import Network
from skep.sandbox.elsewhere import volumes
from skep.sandbox.limits import GIB, Limits
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount

MAKE = "POST /api/sandbox"


@pytest.fixture(scope="module")
def served_cloud() -> Iterator[Cloud]:
    with served() as cloud:
        yield cloud


@pytest.fixture
def cloud(served_cloud: Cloud) -> Iterator[Cloud]:
    yield served_cloud
    served_cloud.mend()
    served_cloud.overrule()
    for machine in served_cloud.machines():
        served_cloud.destroy(machine)


def create(cloud: Cloud, *, labels: dict[str, str] | None = None, **options: Any) -> Creation:
    return Sandbox.create(mechanism="daytona", labels=labels, options={**cloud.options, **options})


async def until(question: Callable[[], Awaitable[bool]], *, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not await question():
        assert time.monotonic() < deadline, f"not so after {within_s} s"
        await asyncio.sleep(0.02)


async def test_a_machine_is_made_as_the_recipe_says_and_removed_at_the_end(cloud: Cloud) -> None:
    labels = {"account": "acme", "session": "s-1"}
    recipe = Sandbox.create(
        mechanism="daytona",
        labels=labels,
        env={"COLOUR": "green"},
        limits=Limits(cpus=1.5, memory_bytes=3 * GIB, disk_bytes=6 * GIB),
        options={**cloud.options, "image": "debian:12", "auto_archive_s": 3600},
    )
    async with recipe as sandbox:
        assert (await sandbox.run("echo $COLOUR")).text == "green\n"
        machine = cloud.machines()[sandbox.id]
        assert machine["labels"].items() >= {"skep.account": "acme", "skep.session": "s-1"}.items()
        assert (machine["cpu"], machine["memory"], machine["disk"]) == (2, 3, 6)
        assert (machine["autoStopInterval"], machine["autoArchiveInterval"]) == (5, 60)
        assert (machine["networkBlockAll"], machine["public"], machine["autoDeleteInterval"]) == (True, False, 0)
    assert cloud.machines() == {}


async def test_a_kept_machine_has_its_files_again_when_it_is_woken_by_its_id(cloud: Cloud) -> None:
    async with create(cloud, keep=True) as sandbox:
        await sandbox.files.write("file", b"kept")
        job = await sandbox.background("sleep 1000")
        kept = sandbox.id
    assert cloud.machines()[kept]["state"] == "stopped"
    with pytest.raises(SandboxLost):
        await job.wait()
    async with create(cloud, sandbox_id=kept) as again:
        assert again.id == kept
        assert await again.files.read("file") == b"kept"
        assert (await again.run("pgrep -x sleep")).exit_code == 1
    assert cloud.machines()[kept]["state"] == "stopped"


async def test_an_archived_machine_comes_back_with_its_files(cloud: Cloud) -> None:
    sandbox = await create(cloud, keep=True)
    assert isinstance(sandbox, DaytonaSandbox)
    await sandbox.files.write("folder/file", b"cold")
    await sandbox.archive()
    assert cloud.machines()[sandbox.id]["state"] == "archived"
    async with create(cloud, sandbox_id=sandbox.id) as again:
        assert await again.files.read("folder/file") == b"cold"
    async with create(cloud) as thrown_away:
        assert isinstance(thrown_away, DaytonaSandbox)
        with pytest.raises(InvalidRequest, match="thrown away"):
            await thrown_away.archive()


async def test_a_kept_machine_is_found_again_by_its_labels_and_never_guessed(cloud: Cloud) -> None:
    async def visit(session: str) -> tuple[str, bytes]:
        async with create(cloud, labels={"account": "acme", "session": session}, keep=True) as sandbox:
            await sandbox.files.append("visits", session)
            return sandbox.id, await sandbox.files.read("visits")

    first, second, third = [await visit(session) for session in "abc"]
    assert len({first[0], second[0], third[0]}) == 3
    assert await visit("c") == (third[0], b"cc")
    with pytest.raises(Conflict, match="3 machines"):
        await create(cloud, labels={"account": "acme"}, keep=True)


async def test_a_machine_left_running_is_taken_over_without_what_ran_on_it(cloud: Cloud) -> None:
    one = await create(cloud, keep=True)
    await one.files.write("file", b"kept")
    job = await one.background("exec sleep 1000")
    async with create(cloud, sandbox_id=one.id) as other:
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(job.wait(), 10)
        assert await other.files.read("file") == b"kept"
        assert (await other.run("pgrep -x sleep")).exit_code == 1
        await one.stop()


async def test_a_machine_that_is_gone_is_not_replaced_by_another(cloud: Cloud) -> None:
    with pytest.raises(NotFound, match="not there any more") as told:
        await create(cloud, sandbox_id="no-such-machine", keep=True)
    assert told.value.hint
    assert cloud.machines() == {}


async def test_an_idle_machine_is_stopped_and_one_at_work_is_kept_awake(cloud: Cloud) -> None:
    async with create(cloud, keep=True) as sandbox:
        assert isinstance(sandbox, DaytonaSandbox)
        sandbox._house.keep_awake(sandbox.occupied, every_s=0.05)
        job = await sandbox.background("sleep 1000")

        async def touched(since: int) -> bool:
            return sum(request.endswith("/last-activity") for request in cloud.seen()) > since

        for _ in range(3):
            before = sum(request.endswith("/last-activity") for request in cloud.seen())
            await until(lambda: touched(before + 1))  # noqa: B023 - awaited in this turn
            cloud.pass_time(minutes=4)
        assert await sandbox.alive()
        await job.kill()

        async def quiet() -> bool:
            before = len(cloud.seen())
            await asyncio.sleep(0.5)
            return len(cloud.seen()) == before

        await until(quiet)
        cloud.pass_time(minutes=6)
        assert cloud.machines()[sandbox.id]["state"] == "stopped"
        with pytest.raises(SandboxLost):
            await sandbox.run("true")


async def test_volumes_are_made_listed_and_shared_by_name(cloud: Cloud) -> None:
    wanted = {"shared": "/data"}
    async with create(cloud, volumes=wanted) as one, create(cloud, volumes=wanted) as other:
        assert (await one.run("echo passed on > /data/file")).ok
        assert (await other.run("cat /data/file")).text == "passed on\n"
    assert "shared" in await volumes("daytona", cloud.options)


async def test_a_machine_that_takes_its_time_is_waited_for(cloud: Cloud) -> None:
    cloud.overrule(start_s=0.5)
    async with create(cloud) as sandbox:
        assert (await sandbox.run("echo up")).text == "up\n"


async def test_a_machine_that_was_given_up_while_it_came_is_removed(cloud: Cloud) -> None:
    cloud.overrule(start_s=60)
    coming = asyncio.ensure_future(create(cloud)._start())

    async def begun() -> bool:
        return bool(cloud.machines())

    await until(begun)
    coming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await coming
    assert cloud.machines() == {}


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"status": 400}, InvalidRequest),
        ({"status": 401}, Denied),
        ({"status": 403}, Denied),
        ({"status": 409}, Conflict),
        ({"status": 429}, LimitReached),
        ({"status": 500}, Unavailable),
        ({"status": 502}, Unavailable),
        ({"status": 504}, Unavailable),
        ({"drop": True}, Unavailable),
    ],
    ids=str,
)
async def test_each_failure_of_the_service_is_told_in_skeps_words(
    cloud: Cloud, how: dict[str, Any], error: type[SkepError]
) -> None:
    cloud.fail(MAKE, **how)
    with pytest.raises(error) as told:
        await create(cloud)
    assert type(told.value) is error
    assert told.value.hint
    assert cloud.key not in str(told.value)


@pytest.mark.parametrize("step", [".*/files/bulk-upload", ".*/process/execute", ".*/process/pty/create-connect"])
async def test_a_machine_that_cannot_be_made_ready_is_not_left_behind(cloud: Cloud, step: str) -> None:
    cloud.fail(step, status=502)
    with pytest.raises(Unavailable):
        await create(cloud, keep=True)
    assert cloud.machines() == {}


async def test_a_wrong_key_and_none_are_denied(cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DAYTONA_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)  # the SDK would look into a file .env
    for options in ({**cloud.options, "api_key": "wrong"}, {"api_url": f"{cloud.url}/api", "target": "here"}):
        with pytest.raises(Denied) as told:
            await Sandbox.create(mechanism="daytona", options=options)
        assert "DAYTONA_API_KEY" in (told.value.hint or "")


async def test_without_its_sdk_it_says_how_to_get_it(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "daytona", None)
    with pytest.raises(SandboxUnusable) as told:
        await create(cloud)
    assert told.value.hint == "pip install 'skep[daytona]'"


async def test_removing_a_machine_is_tried_again_when_the_service_falters(cloud: Cloud) -> None:
    sandbox = await create(cloud)
    cloud.fail("DELETE /api/sandbox/.*", status=502)
    await sandbox.stop()
    assert cloud.machines() == {}


@pytest.mark.parametrize("fate", ["cut", "destroy", "silent"])
async def test_whoever_waits_learns_that_the_machine_is_lost(cloud: Cloud, fate: str) -> None:
    sandbox = await create(cloud, keep=True)
    waiting = asyncio.ensure_future(sandbox.run("sleep 1000"))
    await sandbox.run("true")
    if fate == "cut":
        cloud.cut(sandbox.id)
    else:
        if fate == "silent":
            cloud.freeze(sandbox.id)
        cloud.destroy(sandbox.id)
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(waiting, 10)
    await sandbox.stop()


async def test_bytes_of_any_value_get_there_and_back(cloud: Cloud) -> None:
    """Wherever a line of base64 begins in them, it would be with the sign that goes before a number of parcels."""
    data = b"".join(b"-" * shift + b"\xfb\xef\xbe" * 100_000 for shift in (0, 1, 1)) + bytes(range(256))
    async with create(cloud) as sandbox:
        await sandbox.files.write("file", data)
        assert await sandbox.files.read("file") == data


async def test_a_reader_that_falls_behind_loses_nothing(cloud: Cloud) -> None:
    """The control is the SDK alone: Daytona drops the connection of a reader that is too slow."""
    from daytona import AsyncDaytona, DaytonaConfig

    size = 6_000_000
    async with create(cloud) as sandbox:
        outputs = [asyncio.ensure_future(sandbox.run(f"head -c {size} /dev/zero")) for _ in range(3)]
        while not all(output.done() for output in outputs):
            time.sleep(0.3)  # nothing is read meanwhile
            await asyncio.wait(outputs, timeout=0.1)
        assert [len(output.result().stdout) for output in outputs] == [size] * 3

        async with AsyncDaytona(DaytonaConfig(**cloud.options)) as client:
            machine, seen = await client.get(sandbox.id), bytearray()
            terminal = await machine.process.create_pty_session("control", seen.extend)
            await terminal.send_input(f"exec head -c {size} /dev/zero\n")
            time.sleep(2)
            ended = await asyncio.wait_for(terminal.wait(), 30)
            assert len(seen) < size, ended


async def test_a_preview_link_leads_to_a_server_inside_for_whoever_has_the_token(cloud: Cloud) -> None:
    async with create(cloud) as sandbox:
        assert isinstance(sandbox, DaytonaSandbox)
        await sandbox.files.write("site/hello", b"from inside")
        await sandbox.background("exec python3 -m http.server 8000 --bind 127.0.0.1 --directory site")

        async def listens() -> bool:
            return (await sandbox.run("exec 3<>/dev/tcp/127.0.0.1/8000")).ok

        await until(listens)
        signed = await sandbox.preview_link(8000, lasts_s=60)
        assert signed.token in signed.url
        assert await asyncio.to_thread(_get, signed.url + "hello") == b"from inside"
        plain = await sandbox.preview_link(8000, lasts_s=None)
        with_token = {"x-daytona-preview-token": plain.token}
        assert await asyncio.to_thread(_get, plain.url + "hello", with_token) == b"from inside"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            await asyncio.to_thread(_get, plain.url + "hello")
        with pytest.raises(InvalidRequest):
            await sandbox.preview_link(0)


def _get(url: str, head: dict[str, str] | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=head or {}), timeout=30) as answer:
        body: bytes = answer.read()
        return body


async def test_what_a_machine_elsewhere_cannot_do_is_refused_before_there_is_one(cloud: Cloud, tmp_path: Path) -> None:
    before = len(cloud.seen())
    recipes: list[dict[str, Any]] = [
        {"folder": tmp_path},
        {"mounts": [Mount(str(tmp_path), "/data")]},
        {"read_only": {str(tmp_path): "/data"}},
        {"network": Network.to("example.org")},
        {"options": {**cloud.options, "colour": "green"}},
        {"options": {**cloud.options, "snapshot": "one", "image": "other"}},
        {"options": {**cloud.options, "auto_stop_s": 1}},
    ]
    for recipe in recipes:
        with pytest.raises(InvalidRequest) as told:
            await Sandbox.create(**{"mechanism": "daytona", "options": cloud.options, **recipe})
        assert told.value.hint
        assert cloud.key not in str(told.value)
    assert len(cloud.seen()) == before


@pytest.mark.parametrize("answer", [{"networkBlockAll": False}, {"public": True}], ids=str)
async def test_a_machine_that_is_more_open_than_asked_for_is_not_used(cloud: Cloud, answer: dict[str, bool]) -> None:
    cloud.overrule(answer)
    with pytest.raises(SandboxUnusable, match="was not to be"):
        await create(cloud)
    assert cloud.machines() == {}


async def test_daytonas_own_lists_are_handed_on_as_they_are(cloud: Cloud) -> None:
    async with create(cloud, domain_allow_list="example.org") as sandbox:
        machine = cloud.machines()[sandbox.id]
        assert (machine["domainAllowList"], machine["networkBlockAll"]) == ("example.org", False)


async def test_the_sdk_calls_nobody_else_and_leaves_interrupts_alone(cloud: Cloud, tmp_path: Path) -> None:
    """The control is the SDK alone, with the same variables: it does all of it."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.clouds.daytona.overheard", cloud.url, cloud.key, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.splitlines() == [
        "skep: called others False, traced False, took over interrupts False",
        "sdk alone: called others True, traced True, took over interrupts True",
    ], done.stderr


async def test_the_played_toolbox_serves_what_else_the_sdk_has(cloud: Cloud) -> None:
    from daytona import AsyncDaytona, DaytonaConfig, PtySize, SessionExecuteRequest

    async with AsyncDaytona(DaytonaConfig(**cloud.options)) as client:
        machine = await client.create()
        await machine.fs.upload_file(b"bytes", "/opt/folder/file")
        assert [entry.name for entry in await machine.fs.list_files("/opt/folder")] == ["file"]
        assert await machine.fs.download_file("/opt/folder/file") == b"bytes"
        await machine.process.create_session("session")
        ask = SessionExecuteRequest(command="read x; echo got $x; echo no >&2", run_async=True)
        command = await machine.process.execute_session_command("session", ask)
        await machine.process.send_session_command_input("session", command.cmd_id, "input\n")
        out: list[str] = []
        err: list[str] = []
        await machine.process.get_session_command_logs_async("session", command.cmd_id, out.append, err.append)
        assert ("".join(out), "".join(err)) == ("got input\n", "no\n")
        terminal = await machine.process.create_pty_session("terminal", lambda _: None)
        assert (await terminal.resize(PtySize(rows=40, cols=100))).rows == 40
        await terminal.send_input("exit 7\n")
        assert (await terminal.wait()).exit_code == 7
        await machine.set_labels({"a": "b"})
        assert [found.id async for found in client.list()] == [machine.id]


@pytest.mark.service
async def test_a_real_machine_of_daytona_runs_a_command_and_is_removed() -> None:
    import os

    if not os.environ.get("DAYTONA_API_KEY"):
        pytest.skip("DAYTONA_API_KEY is not set: set it to a key of Daytona to try the real service")
    async with Sandbox.create(mechanism="daytona", labels={"account": "skep-tests"}) as sandbox:
        assert (await sandbox.run("id -un; pwd")).text == "agent\n/workspace\n"
        await sandbox.files.write("file", b"x" * 1_000_000)
        assert len(await sandbox.files.read("file")) == 1_000_000
        assert not (await sandbox.run("exec 3<>/dev/tcp/1.1.1.1/443", timeout_s=20)).ok
