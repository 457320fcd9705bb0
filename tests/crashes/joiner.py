"""A guest to be killed: joins a sandbox of a holder and stops at a moment. Run as: joiner.py FOLDER ID MOMENT.

Whatever it starts carries its own number in the arguments, so that the test can look for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from skep.sandbox.joining import JoinedSandbox, join
from skep.sandbox.sandbox import Size
from skep.workspace.door import call
from skep.workspace.message import packed

MOMENTS = (
    "knocked", "asked", "answered", "joined", "running", "deaf", "terminal", "writing", "spawning", "coming and going",
)  # fmt: skip


async def stay() -> None:
    print("ready", flush=True)
    await asyncio.Event().wait()


async def at_the_door(folder: Path, sandbox_id: str, moment: str) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(folder / "door"))
        if moment == "asked":
            peer.send(packed({"act": "join", "id": sandbox_id}, most=1000))
        await stay()


async def joined(folder: Path, sandbox_id: str) -> JoinedSandbox:
    answer = await call(folder, {"act": "join", "id": sandbox_id})
    return await join(socket.socket(fileno=answer.fds[0]), answer.body)


async def pieces() -> AsyncIterator[bytes]:
    yield b"half of it"
    await stay()


async def busy(sandbox: JoinedSandbox, moment: str) -> None:
    sleep = ["sleep", f"1000.{os.getpid()}"]
    match moment:
        case "running":
            await sandbox.start(sleep)
        case "deaf":
            await sandbox.start(["bash", "-c", f"trap '' TERM HUP INT; {' '.join(sleep)} & {' '.join(sleep)}; wait"])
        case "terminal":
            await sandbox.start(sleep, terminal=Size())
        case "writing":
            await sandbox.files.write("file", pieces())
        case "spawning":
            print("ready", flush=True)
            while True:
                process = await sandbox.start(sleep)
                await process.kill()
                process.release()
    await stay()


async def main(folder: Path, sandbox_id: str, moment: str) -> None:
    if moment in ("knocked", "asked"):
        await at_the_door(folder, sandbox_id, moment)
    if moment == "answered":
        await call(folder, {"act": "join", "id": sandbox_id})
        await stay()
    if moment == "coming and going":
        print("ready", flush=True)
        while True:
            async with await joined(folder, sandbox_id) as sandbox:
                await sandbox.run("echo there > file")
    await busy(await joined(folder, sandbox_id), moment)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
