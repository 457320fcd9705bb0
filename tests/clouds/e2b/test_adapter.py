"""The mechanism e2b, through the unmodified SDK: what only it does, and what it makes of a cloud that fails."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.clouds.e2b.cloud import PlayedCloud, played

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
from skep.sandbox.e2b import E2BSandbox
from skep.sandbox.egress.network import Network, Secret
from skep.sandbox.egress.policy import Traffic
from skep.sandbox.elsewhere import volumes
from skep.sandbox.sandbox import Sandbox
from skep.sandbox.stack import Mount
from skep.testing.promise import eventually, read_until

LABELS = {"account": "a-1", "session": "s-1"}
SOON_S = 2.0
#: An answer with which the SDK does not try again.
FINAL = {"should-retry": "false"}


@pytest.fixture(scope="module")
def cloud() -> Iterator[PlayedCloud]:
    with played() as running:
        yield running


@pytest.fixture(autouse=True)
def whole(cloud: PlayedCloud) -> Iterator[None]:
    yield
    cloud.break_()


@asynccontextmanager
async def computer(cloud: PlayedCloud, **more: Any) -> AsyncIterator[E2BSandbox]:
    options = {**cloud.options, **more.pop("options", {})}
    async with Sandbox.create(mechanism="e2b", options=options, **more) as sandbox:
        assert isinstance(sandbox, E2BSandbox)
        yield sandbox


def machine(cloud: PlayedCloud, sandbox_id: str) -> dict[str, Any]:
    return next(one for one in cloud.machines() if one["sandboxID"] == sandbox_id)


def ids(cloud: PlayedCloud) -> list[str]:
    return [one["sandboxID"] for one in cloud.machines()]


async def test_a_machine_is_made_without_a_way_out_and_closed_to_visitors_and_says_whose_it_is(
    cloud: PlayedCloud,
) -> None:
    async with computer(cloud, labels=LABELS, env={"MINE": "1"}, options={"template": "tools"}) as sandbox:
        asked = machine(cloud, sandbox.id)["asked"]
        assert (asked["templateID"], asked["timeout"], asked["envVars"]) == ("tools", 300, {"MINE": "1"})
        assert asked["allow_internet_access"] is False
        assert asked["network"] == {"denyOut": ["0.0.0.0/0"], "allowPublicTraffic": False}
        assert (asked["autoPause"], asked["autoResume"]) == (False, {"enabled": False})
        assert asked["metadata"].items() >= LABELS.items() and asked["metadata"]["sandbox"]
        assert (await sandbox.run("echo $MINE")).stdout == b"1\n"
    assert sandbox.id not in ids(cloud)


async def test_processes_and_files_live_through_a_pause_and_nothing_they_say_is_lost(cloud: PlayedCloud) -> None:
    async with computer(cloud) as sandbox:
        await sandbox.files.write("kept", b"1")
        process = await sandbox.start("echo $$; i=0; while read -r x; do i=$((i+1)); echo $x $i; done", stdin=True)
        pid = await read_until(process.stdout, b"\n")
        flood = await sandbox.start("seq 1000000")
        for number in range(1, 4):
            await sandbox.pause()
            assert machine(cloud, sandbox.id)["state"] == "paused"
            await sandbox.resume()
            await process.write(b"word\n")
            assert await read_until(process.stdout, b"\n") == b"word %d\n" % number
        said = b"".join([piece async for piece in flood.stdout])
        assert said == b"".join(b"%d\n" % number for number in range(1, 1_000_001))
        assert await sandbox.files.read("kept") == b"1"
        assert (await sandbox.run(f"kill -0 {int(pid)}")).ok
        process.release()
        flood.release()


async def test_a_call_to_a_paused_machine_is_refused_at_once(cloud: PlayedCloud) -> None:
    async with computer(cloud) as sandbox:
        await sandbox.pause()
        for call in (sandbox.run("true"), sandbox.files.read("x"), sandbox.kill_all(), sandbox.connect(80)):
            with pytest.raises(Conflict, match="paused") as refused:
                await asyncio.wait_for(call, SOON_S)
            assert refused.value.hint
        assert await sandbox.alive()
        await sandbox.resume()
        assert (await sandbox.run("echo fine")).stdout == b"fine\n"


async def test_a_machine_that_goes_while_it_is_paused_is_lost_when_it_should_go_on(cloud: PlayedCloud) -> None:
    async with computer(cloud) as sandbox:
        waiting = asyncio.ensure_future(sandbox.run("sleep 1000"))
        await sandbox.run("true")
        await sandbox.pause()
        cloud.kill(sandbox.id)
        assert not await sandbox.alive()
        for _ in range(2):
            with pytest.raises(SandboxLost):
                await asyncio.wait_for(sandbox.resume(), SOON_S)
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(waiting, SOON_S)


async def test_a_kept_machine_is_found_again_by_its_labels_or_its_id_with_its_files(cloud: PlayedCloud) -> None:
    keep = {"keep": True}
    async with computer(cloud, labels=LABELS, options=keep) as sandbox:
        await sandbox.files.write("kept", b"1")
        await sandbox.run("sleep 31415 &")
    assert machine(cloud, sandbox.id)["state"] == "paused"
    async with computer(cloud, labels=LABELS, options={**keep, "find": True}) as found:
        assert (found.id, await found.files.read("kept")) == (sandbox.id, b"1")
        assert not (await found.run("grep -lz 3141[5] /proc/[0-9]*/cmdline")).ok
    async with computer(cloud, options={"sandbox_id": sandbox.id}) as again:
        assert await again.files.read("kept") == b"1"
    assert sandbox.id not in ids(cloud)


async def test_a_machine_that_is_not_there_is_never_replaced_by_a_new_one(cloud: PlayedCloud) -> None:
    before = ids(cloud)
    for options, labels in (({"sandbox_id": "gone"}, {}), ({"find": True}, {"account": "nobody"})):
        with pytest.raises(NotFound) as missing:
            await Sandbox.create(mechanism="e2b", options={**cloud.options, **options}, labels=labels)
        assert "create another" in (missing.value.hint or "")
    assert ids(cloud) == before


async def test_a_machine_that_is_used_again_is_closed_as_a_new_one_would_be(cloud: PlayedCloud) -> None:
    async with computer(cloud, options={"keep": True, "public": True}) as sandbox:
        assert sandbox.preview(80)[1] == {}
    with pytest.raises(InvalidRequest, match="visit"):
        await Sandbox.create(mechanism="e2b", options={**cloud.options, "sandbox_id": sandbox.id})
    async with computer(cloud, options={"sandbox_id": sandbox.id, "public": True}):
        told = [one["body"] for one in cloud.log() if one["path"] == f"/sandboxes/{sandbox.id}/network"]
        assert told == [{"denyOut": ["0.0.0.0/0"]}]


async def test_a_machine_that_was_there_is_not_ended_because_no_twin_starts(cloud: PlayedCloud) -> None:
    async with computer(cloud, options={"keep": True}) as sandbox:
        await sandbox.files.write("kept", b"1")
    cloud.break_({"match": "Process/Start", "times": 9, "status": 500})
    with pytest.raises(Unavailable):
        await Sandbox.create(mechanism="e2b", options={**cloud.options, "sandbox_id": sandbox.id})
    cloud.break_()
    async with computer(cloud, options={"sandbox_id": sandbox.id}) as again:
        assert await again.files.read("kept") == b"1"


async def test_a_pause_that_the_cloud_refuses_leaves_the_sandbox_at_work(cloud: PlayedCloud) -> None:
    async with computer(cloud) as sandbox:
        process = await sandbox.start("while read -r x; do echo $x; done", stdin=True)
        cloud.break_({"match": "/pause", "times": 1, "status": 503, "headers": FINAL})
        with pytest.raises(Unavailable):
            await sandbox.pause()
        await process.write(b"still here\n")
        assert await read_until(process.stdout, b"\n") == b"still here\n"
        process.release()


async def test_labels_that_several_machines_have_choose_none_of_them(cloud: PlayedCloud) -> None:
    async with computer(cloud, labels={"account": "twins"}), computer(cloud, labels={"account": "twins"}):
        with pytest.raises(Conflict, match="have these labels"):
            await Sandbox.create(mechanism="e2b", options={**cloud.options, "find": True}, labels={"account": "twins"})


async def test_who_takes_a_machine_over_ends_what_another_controller_ran_there(cloud: PlayedCloud) -> None:
    async with computer(cloud, labels={"account": "shared"}) as first:
        waiting = asyncio.ensure_future(first.run("sleep 31415"))
        await first.run("true")
        async with computer(cloud, options={"sandbox_id": first.id, "keep": True}) as second:
            with pytest.raises(SandboxLost):
                await asyncio.wait_for(waiting, 10)

            async def ended() -> bool:
                return not (await second.run("grep -lz 3141[5] /proc/[0-9]*/cmdline")).ok

            await eventually(ended)


async def test_a_machine_at_work_is_kept_and_an_idle_one_stops_by_itself(cloud: PlayedCloud) -> None:
    async with computer(cloud, options={"timeout_s": 4}) as busy, computer(cloud, options={"timeout_s": 4}) as idle:
        job = await busy.background("sleep 1000")
        await asyncio.wait_for(idle.gone(), 20)
        assert idle.id not in ids(cloud)
        extended = [one for one in cloud.log() if one["path"] == f"/sandboxes/{busy.id}/timeout"]
        assert extended[0]["body"] == {"timeout": 4}
        assert job.running and (await busy.run("echo fine")).ok
        with pytest.raises(SandboxLost):
            await idle.run("true")


async def test_a_kept_machine_that_stops_by_itself_is_only_paused(cloud: PlayedCloud) -> None:
    async with computer(cloud, options={"keep": True}) as sandbox:
        await sandbox.files.write("kept", b"1")
        cloud.expire(sandbox.id)
        await asyncio.wait_for(sandbox.gone(), 10)
    async with computer(cloud, options={"sandbox_id": sandbox.id}) as again:
        assert await again.files.read("kept") == b"1"


@pytest.mark.parametrize("how", ["kill", "expire"])
async def test_a_machine_that_goes_under_a_command_is_lost_within_two_seconds(cloud: PlayedCloud, how: str) -> None:
    async with computer(cloud) as sandbox:
        waiting = asyncio.ensure_future(sandbox.run("sleep 1000"))
        await sandbox.run("true")
        getattr(cloud, how)(sandbox.id)
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(waiting, SOON_S)
        assert not await sandbox.alive()


async def test_a_stream_that_is_cut_is_picked_up_again_without_a_byte_lost(cloud: PlayedCloud) -> None:
    async with computer(cloud) as sandbox:
        data = os.urandom(1 << 20)
        cloud.break_(
            {"match": "Process/(Connect|Start)", "times": 3, "cut_after": 5},
            {"match": "Process/SendInput", "times": 2, "status": 502, "message": "bad gateway"},
            {"match": "Process/SendInput", "times": 2, "cut_after": 0},
            {"match": "Process/SendInput", "times": 2, "status": 429},
        )
        await sandbox._house._link._line.close()  # as a load balancer would
        assert (await sandbox.run(["cat"], input=data)).stdout == data


FAULTS: dict[str, tuple[dict[str, Any], type[SkepError]]] = {
    "too many": ({"match": "POST /v2/sandboxes$", "times": 9, "status": 429, "headers": FINAL}, LimitReached),
    "broken": ({"match": "POST /v2/sandboxes$", "times": 9, "status": 500}, Unavailable),
    "a bad gateway": ({"match": "POST /v2/sandboxes$", "times": 9, "status": 502, "headers": FINAL}, Unavailable),
    "busy": ({"match": "POST /v2/sandboxes$", "times": 9, "status": 503, "headers": FINAL}, Unavailable),
    "silent": ({"match": "POST /v2/sandboxes$", "times": 9, "delay_s": 1.0, "status": 504}, Unavailable),
    "hanging up": ({"match": "POST /v2/sandboxes$", "times": 9, "cut_after": 0}, Unavailable),
    "an unknown template": ({"match": "POST /v2/sandboxes$", "times": 9, "status": 404}, InvalidRequest),
    "an upload that fails": ({"match": "POST /files", "times": 9, "status": 500}, Unavailable),
    "a disk that is full": ({"match": "POST /files", "times": 9, "status": 507}, LimitReached),
    "a start that fails": ({"match": "Process/Start", "times": 9, "status": 500}, Unavailable),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
async def test_a_cloud_that_fails_is_an_error_that_says_what_to_do_and_leaves_no_machine(
    cloud: PlayedCloud, name: str
) -> None:
    before = ids(cloud)
    fault, kind = FAULTS[name]
    cloud.break_(fault)
    timeout = {"request_timeout_s": 0.5} if name == "silent" else {}
    with pytest.raises(kind) as raised:
        await Sandbox.create(mechanism="e2b", options={**cloud.options, **timeout})
    assert raised.value.hint
    cloud.break_()

    async def tidy() -> bool:
        return ids(cloud) == before

    await eventually(tidy)


async def test_a_cloud_that_is_busy_for_a_moment_is_asked_again(cloud: PlayedCloud) -> None:
    cloud.break_({"match": "POST /v2/sandboxes$", "times": 2, "status": 429})
    async with computer(cloud) as sandbox:
        assert (await sandbox.run("echo fine")).ok


async def test_a_wrong_key_and_none_are_refused_with_the_way_to_set_one(
    cloud: PlayedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    for key in ("e2b_wrong", None):
        with pytest.raises(Denied) as refused:
            await Sandbox.create(mechanism="e2b", options={**cloud.options, "api_key": key})
        assert "E2B_API_KEY" in (refused.value.hint or "")


async def test_a_port_is_previewed_at_the_providers_address_and_reached_through_the_twin(cloud: PlayedCloud) -> None:
    async with computer(cloud) as sandbox:
        url, headers = sandbox.preview(8000)
        assert url == f"https://8000-{sandbox.id}.e2b.test"
        assert headers == {"e2b-traffic-access-token": machine(cloud, sandbox.id)["traffic"]}
        await sandbox.files.write("index.html", b"hello")
        job = await sandbox.background("exec python3 -m http.server 8000 --bind 127.0.0.1")

        async def listens() -> bool:
            try:
                (await sandbox.connect(8000)).close()
            except NotFound:
                return False
            return True

        await eventually(listens)
        connection = await sandbox.connect(8000)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, b"GET /index.html HTTP/1.0\r\n\r\n")
        answer = b""
        while piece := await loop.sock_recv(connection, 4096):
            answer += piece
        connection.close()
        assert answer.endswith(b"hello")
        await job.kill()


async def test_volumes_are_made_listed_and_shared_by_name(cloud: PlayedCloud) -> None:
    options = {"volumes": {"/data": "shelf"}}
    async with computer(cloud, options=options) as one, computer(cloud, options=options) as other:
        assert machine(cloud, one.id)["asked"]["volumeMounts"] == [{"name": "shelf", "path": "/data"}]
        assert (await one.run("echo honey > /data/jar")).ok
        assert (await other.run("cat /data/jar")).text == "honey\n"
    assert await volumes("e2b", cloud.options) == ["shelf"]


async def _token() -> str:
    return "secret"


REFUSED: dict[str, dict[str, Any]] = {
    "a wildcard": {"network": Network.to("*.example.org")},
    "a port": {"network": Network.to("example.org:8443")},
    "one of the two ports": {"network": Network.to("example.org:443")},
    "a secret": {"network": Network.to(secrets={"TOKEN": Secret("example.org", "Authorization", _token)})},
    "a pinned host": {"network": Network.to("example.org", upstreams={"example.org": "10.0.0.1"})},
    "counted traffic": {"network": Network.to("example.org", traffic=Traffic(bytes_total=1))},
    "a folder": {"folder": "/tmp/somewhere"},
    "a mount": {"mounts": [Mount("/usr/share", "/opt/share")]},
    "more of the host": {"read_only": {"/usr/share": "/opt/share"}},
    "an unknown option": {"options": {"temlate": "base"}},
    "a time that is none": {"options": {"timeout_s": "soon"}},
    "no time at all": {"options": {"timeout_s": 0}},
    "volumes for a machine that is there": {"options": {"sandbox_id": "x", "volumes": {"/data": "shelf"}}},
    "two ways to name a machine": {"options": {"find": True, "sandbox_id": "x"}},
    "no labels to find it by": {"options": {"find": True}},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_kept_there_is_refused_before_anything_is_made(cloud: PlayedCloud, name: str) -> None:
    asked = len(cloud.log())
    more = dict(REFUSED[name])
    options = {**cloud.options, **more.pop("options", {})}
    with pytest.raises(InvalidRequest) as refused:
        await Sandbox.create(mechanism="e2b", options=options, **more)
    assert refused.value.hint
    assert len(cloud.log()) == asked


async def test_a_policy_is_told_to_the_firewall_and_no_name_server_is_let_out(cloud: PlayedCloud) -> None:
    """The played machine has a read-only /etc, so the names cannot be made known: then there is no sandbox at all."""
    before = ids(cloud)
    with pytest.raises(SandboxUnusable, match="hosts"):
        await Sandbox.create(mechanism="e2b", options=cloud.options, network=Network.to("example.org", "pypi"))
    asked = [one["body"] for one in cloud.log() if one["path"] == "/v2/sandboxes" and one["method"] == "POST"][-1]
    assert asked["allow_internet_access"] is True
    assert asked["network"] == {
        "allowOut": ["example.org", "pypi.org", "files.pythonhosted.org"],
        "denyOut": ["0.0.0.0/0"],
        "dnsServers": [],
        "allowPublicTraffic": False,
    }
    assert ids(cloud) == before


async def test_a_sandbox_without_a_network_gets_none_later(cloud: PlayedCloud) -> None:
    async with computer(cloud) as sandbox:
        with pytest.raises(InvalidRequest, match="without a network"):
            await sandbox.set_policy(Network.to("example.org").policy)


async def test_without_the_sdk_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(SandboxUnusable) as refused:
        await Sandbox.create(mechanism="e2b")
    assert refused.value.hint == "pip install 'skep[e2b]'"


@pytest.mark.service
@pytest.mark.skipif(not os.environ.get("E2B_API_KEY"), reason="set E2B_API_KEY to run this at E2B itself")
async def test_the_real_service_runs_pauses_wakes_and_ends_a_machine() -> None:
    async with Sandbox.create(mechanism="e2b", labels=LABELS, options={"timeout_s": 120}) as sandbox:
        assert (await sandbox.run("id -un; pwd")).text.split() == ["agent", "/workspace"]
        assert not (await sandbox.run("timeout 5 bash -c 'echo > /dev/tcp/1.1.1.1/443'")).ok
        job = await sandbox.background("while :; do date; sleep 0.1; done")
        await sandbox.files.write("kept", b"1")
        await sandbox.pause()
        await sandbox.resume()
        assert await sandbox.files.read("kept") == b"1"
        assert job.running
    assert not await sandbox.alive()
