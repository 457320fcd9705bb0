"""A controller to be killed: does what it is told with a sandbox, says when it is in the midst of it, and goes on.

Run as `python sandbox_controller.py DEED [FOLDER]`. It begins at the first line on its standard input; each line of
its standard output is a JSON object, the last one `{"now": …}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from skep.errors import NotFound
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Sandbox, Size

#: Ends only by the kill: ignores what can be ignored, and keeps a grandchild.
STUBBORN = "trap '' HUP TERM INT PIPE; sleep 1000 & touch started; while :; do sleep 0.01; done"
DAEMON = f"( ( setsid setsid sh -c {json.dumps(STUBBORN)} < /dev/null > /dev/null 2>&1 & ) & )"
FORKS = "touch started; while :; do (setsid sleep 0.2 &) ; done"
GIB = 1 << 30

Deed = Callable[[Sandbox], Awaitable[None]]


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def started(sandbox: Sandbox) -> None:
    """Wait until a command inside has made its mark."""
    while True:
        try:
            await sandbox.files.stat("started")
        except NotFound:
            await asyncio.sleep(0.005)
        else:
            return


async def during(sandbox: Sandbox, act: Awaitable[object]) -> None:
    task = asyncio.ensure_future(act)
    await started(sandbox)
    say(now=True)
    await task


async def run(sandbox: Sandbox) -> None:
    await during(sandbox, sandbox.run(STUBBORN, timeout_s=1000))


async def stream(sandbox: Sandbox) -> None:
    process = await sandbox.start("yes & yes >&2 & wait")
    await process.stdout.read()
    say(now=True)
    while await process.stdout.read():
        pass


async def terminal(sandbox: Sandbox) -> None:
    process = await sandbox.start("bash -i", terminal=Size(24, 80))
    await process.write(b"sleep 1000 & yes\n")
    seen = b""
    while b"y\r\ny\r\n" not in seen:
        seen += await process.stdout.read()
    say(now=True)
    while await process.stdout.read():
        pass


async def shell(sandbox: Sandbox) -> None:
    opened = await sandbox.shell()
    await opened.run("export KEPT=1; cd /tmp")
    await during(sandbox, opened.run(f"cd /workspace; {STUBBORN}", timeout_s=1000))


async def daemon(sandbox: Sandbox) -> None:
    assert (await sandbox.run(DAEMON)).ok
    await started(sandbox)
    say(now=True)
    await asyncio.sleep(1000)


async def background(sandbox: Sandbox) -> None:
    job = await sandbox.background(STUBBORN)
    await during(sandbox, job.wait())


async def pause(sandbox: Sandbox) -> None:
    await sandbox.background(STUBBORN)
    await started(sandbox)
    await sandbox.pause()
    say(now=True)
    await asyncio.sleep(1000)


async def forks(sandbox: Sandbox) -> None:
    await during(sandbox, sandbox.run(FORKS, timeout_s=1000))


async def write(sandbox: Sandbox) -> None:
    await sandbox.background(STUBBORN)
    await started(sandbox)

    async def pieces() -> AsyncIterator[bytes]:
        piece = os.urandom(1 << 20)
        for number in range(GIB // len(piece)):
            yield piece
            if number == 100:
                say(now=True)

    await sandbox.files.write("large", pieces())
    await asyncio.sleep(1000)


async def stop(sandbox: Sandbox) -> None:
    await sandbox.run("for d in $(seq 10); do mkdir d$d; (cd d$d; touch $(seq 20)); done")
    await sandbox.background(STUBBORN)
    await started(sandbox)
    say(now=True)
    await sandbox.stop()
    await asyncio.sleep(1000)


async def fork(sandbox: Sandbox) -> None:
    await sandbox.background(STUBBORN)
    await started(sandbox)
    if (child := os.fork()) == 0:
        time.sleep(1000)
    say(child=child)
    say(now=True)
    await asyncio.sleep(1000)


async def idle(_: Sandbox) -> None:
    say(now=True)
    await asyncio.sleep(1000)


async def one(sandbox: Sandbox) -> None:
    assert (await sandbox.run("true")).ok
    say(now=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def create(folder: str | None) -> None:
    say(now=True)
    while True:
        async with Sandbox.create(folder) as sandbox:
            assert (await sandbox.run(DAEMON)).ok


DEEDS: dict[str, Deed] = {
    deed.__name__: deed
    for deed in (run, stream, terminal, shell, daemon, background, pause, forks, write, stop, fork, idle, one)
}


async def main() -> None:
    name, folder = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    sys.stdin.readline()
    if name == "create":
        await create(folder)
    sandbox = await Sandbox.create(folder, limits=Limits(processes=200))
    say(id=sandbox.id)
    await DEEDS[name](sandbox)
    await sandbox.stop()


asyncio.run(main())
