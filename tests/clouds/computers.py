"""The machines of a cloud that is played on this one: real processes, real files, halted and gone for real."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from skep.sandbox.files import Files
from skep.sandbox.limits import Limits
from skep.sandbox.sandbox import Execution, Process, Sandbox, Size, User
from skep.sandbox.stack import Mount

#: A machine of a cloud has more room than what is put on it, whose own limits are the ones to be seen.
ROOM = Limits(processes=2048, command_s=60.0, output_bytes=64 << 20)


@dataclass(slots=True)
class Computer:
    """A machine: a bubblewrap sandbox, with /opt as a disk that root of the cloud can write to.

    Its root is the fake one, the user `agent` with its home /workspace is there from the start, and so is Python.
    """

    sandbox: Sandbox
    disk: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    halted: bool = False

    @classmethod
    async def boot(cls, env: Mapping[str, str] | None = None, shown: Mapping[str, str] | None = None) -> Self:
        """Start a machine; `shown` are folders of this one that appear on it, to be written."""
        disk = tempfile.mkdtemp(prefix="skep-computer-")
        mounts = [Mount(host, inside, "read-write") for host, inside in {disk: "/opt", **(shown or {})}.items()]
        try:
            sandbox = await Sandbox.create(env=env, limits=ROOM, mounts=mounts, mechanism="bubblewrap")
        except BaseException:
            shutil.rmtree(disk, ignore_errors=True)
            raise
        return cls(sandbox, disk)

    @property
    def files(self) -> Files:
        return self.sandbox.files

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User = "agent",
        stdin: bool = False,
        terminal: Size | None = None,
    ) -> Process:
        return await self.sandbox.start(argv, cwd=cwd, env=env, user=user, stdin=stdin, terminal=terminal)

    async def run(self, argv: Sequence[str], *, user: User = "agent") -> Execution:
        return await self.sandbox.run(argv, user=user)

    async def running(self) -> bool:
        return not self.halted and await self.sandbox.alive()

    async def halt(self) -> None:
        """Stop every process where it is; memory and files stay."""
        self.halted = True
        await self.sandbox.pause()

    async def wake(self) -> None:
        await self.sandbox.resume()
        self.halted = False

    async def destroy(self) -> None:
        """End the machine and all that was on it. Safe to repeat."""
        await self.sandbox.stop()
        await asyncio.to_thread(shutil.rmtree, self.disk, True)
