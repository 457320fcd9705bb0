"""A controller to be killed: starts a sandbox with something hostile in it, says so, and waits.

Run as: controller.py HOSTILE MARK. Everything hostile carries the mark in its arguments, so that the test can find it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from skep.errors import LimitReached
from skep.sandbox.sandbox import Sandbox, Size

_DAEMON = """
import os, signal, sys, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
if os.fork():
    time.sleep(60)
os.setsid()
if os.fork():
    os._exit(0)
os.closerange(0, 1024)
open('up', 'w').close()
while True:
    time.sleep(1)
"""
_STORM = """
import os, time
open('up', 'w').close()
while True:  # a new process each time: nobody who looks for a number finds it
    time.sleep(0.005)
    if os.fork():
        os._exit(0)
    os.setsid()
"""
_HALTER = """
import os, signal, time
if os.fork() == 0:
    while True:
        time.sleep(1)
open('up', 'w').close()
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except OSError:
        pass
"""
HOSTILE = {"daemon": _DAEMON, "storm": _STORM, "halter": _HALTER, "paused": _DAEMON, "terminal": _DAEMON}


async def main(kind: str, mark: str) -> None:
    sandbox = await Sandbox.create()
    command = ["/usr/bin/python3", "-c", HOSTILE[kind], mark]
    await sandbox.start(command, terminal=Size() if kind == "terminal" else None)
    while "up" not in [entry.name for entry in await sandbox.files.list()]:
        await asyncio.sleep(0.01)
    if kind == "paused":
        await sandbox.pause()
    if kind == "halter":  # an order under way, whose child is halted on its way
        for _ in range(5):
            with contextlib.suppress(LimitReached):
                await sandbox.start(["/bin/sleep", "60"])
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
