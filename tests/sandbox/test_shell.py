"""How the lasting shell keeps its state; what it promises is in the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from skep.errors import InvalidRequest
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox.create() as made:
        yield made


async def test_its_state_lies_outside_of_the_workspace(sandbox: Sandbox) -> None:
    shell = await sandbox.shell()
    await shell.run("x=1")
    assert await sandbox.files.list() == []
    assert (await shell.run("ls -A /workspace /tmp")).text.split() == ["/tmp:", "/workspace:"]


async def test_nothing_of_its_machinery_shows_in_what_a_command_sees(sandbox: Sandbox) -> None:
    shell = await sandbox.shell()
    for _ in range(2):
        seen = await shell.run("env; echo $#; echo $0; alias; trap -p TERM")
        assert "skep" not in seen.text.lower(), seen.text
    assert (await shell.run("env | sort | head -3; unset x; f() { :; }; declare -f f")).ok


async def test_a_command_killed_in_the_middle_of_saving_spoils_nothing(sandbox: Sandbox) -> None:
    shell = await sandbox.shell()
    await shell.run("set -o noclobber; x=kept")
    state = (await sandbox.files.list("/cache/.skep-shells"))[0].name
    await sandbox.files.write(f"/cache/.skep-shells/{state}.new", b"x='half a sta")
    assert (await shell.run("echo $x; y=later")).stdout == b"kept\n"
    assert (await shell.run("echo $y")).stdout == b"later\n"


@pytest.mark.parametrize("text", [b"", b"garbage (((", b"exit 3", b"\x00\xff" * 100, b"x='unclosed"])
async def test_a_state_that_was_tampered_with_ends_no_shell_for_good(sandbox: Sandbox, text: bytes) -> None:
    shell = await sandbox.shell()
    await shell.run("x=1")
    state = (await sandbox.files.list("/cache/.skep-shells"))[0].name
    await sandbox.files.write(f"/cache/.skep-shells/{state}", text)
    await shell.run("true")
    if text == b"exit 3":
        await shell.close()  # who writes that into the state has asked for it; closing helps
    assert (await shell.run("echo works")).stdout == b"works\n"


async def test_a_full_cache_costs_the_state_and_not_the_command() -> None:
    async with Sandbox.create(limits=Limits(cache_bytes=1 << 20)) as sandbox:
        shell = await sandbox.shell()
        await shell.run("x=before; cat /dev/zero > /cache/full")
        assert (await shell.run("x=after; echo $x")).stdout == b"after\n"
        assert (await shell.run("rm /cache/full; echo runs")).stdout == b"runs\n"
        await shell.run("x=again")
        assert (await shell.run("echo $x")).stdout == b"again\n"


async def test_a_command_too_long_for_one_argument_is_refused_with_a_way_out(sandbox: Sandbox) -> None:
    shell = await sandbox.shell()
    with pytest.raises(InvalidRequest, match="too long") as refused:
        await shell.run("echo " + "x" * 200_000)
    assert "file" in (refused.value.hint or "")
    assert (await shell.run("echo fine")).stdout == b"fine\n"


async def test_a_large_variable_lasts(sandbox: Sandbox) -> None:
    shell = await sandbox.shell()
    await shell.run("x=$(head -c 500000 /dev/zero | tr '\\0' x)")
    assert (await shell.run("echo ${#x}")).stdout == b"500000\n"


async def test_a_shell_outlives_everything_inside(sandbox: Sandbox) -> None:
    shell = await sandbox.shell()
    await shell.run("x=1; sleep 1000 &")
    await sandbox.kill_all()
    assert (await shell.run("echo $x")).stdout == b"1\n"
