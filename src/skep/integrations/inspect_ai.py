"""Skep's sandboxes for inspect_ai: `sandbox="skep"` in a task.

Each sample has a sandbox of its own, which ends with the sample. Configure it with `SkepSandboxConfig`, or with a file
`skep.yaml` beside the task.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Literal, TypeVar, overload

from pydantic import BaseModel

from skep.errors import InvalidRequest, LimitReached, Unavailable
from skep.integrations import users
from skep.integrations.command import carry_out, refused_with
from skep.integrations.extra import extra
from skep.integrations.filesystem import Filesystem
from skep.integrations.sample import SkepSandboxConfig, clear, computer, prepare
from skep.integrations.standby import Standby, ended
from skep.sandbox.blocking import elsewhere
from skep.sandbox.sandbox import Execution, Sandbox

with extra("inspect", brings="inspect_ai"):
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxEnvironment,
        SandboxEnvironmentConfigType,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        concurrency,
        sandboxenv,
    )

__all__ = ["SkepSandboxConfig", "SkepSandboxEnvironment"]

T = TypeVar("T")

_AT_ONCE = 2 * (os.cpu_count() or 1)
_POLLING_S = 0.2


@sandboxenv(name="skep")
class SkepSandboxEnvironment(SandboxEnvironment):
    """The sandbox of one sample."""

    def __init__(self, standby: Standby, sandbox: Sandbox, *, adds_users: bool) -> None:
        super().__init__()
        self._standby = standby
        self._sandbox = sandbox
        self._files = Filesystem(sandbox.files)
        self._adds_users = adds_users

    @classmethod
    async def open(cls, config: SkepSandboxConfig) -> SkepSandboxEnvironment:
        standby = Standby(lambda: computer(config))
        try:
            sandbox = await elsewhere(standby.sandbox())
        except BaseException:
            await ended(standby)
            raise
        return cls(standby, sandbox, adds_users=config.adds_users)

    async def close(self) -> None:
        await ended(self._standby)

    @classmethod
    def config_files(cls) -> list[str]:
        return ["skep.yaml", "skep.yml"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return SkepSandboxConfig.model_validate(config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        return _AT_ONCE

    def default_polling_interval(self) -> float:
        return _POLLING_S

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        await elsewhere(prepare(SkepSandboxConfig.load(config)))

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        return {"default": await cls.open(SkepSandboxConfig.load(config))}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            await environment.as_type(SkepSandboxEnvironment).close()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Do away with what killed evaluations left; sandboxes end with the process that made them."""
        await elsewhere(clear(id))

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109 - inspect_ai's name
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command. One that is out of time is not tried again: nothing between here and there can be stuck."""
        keep = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        data = input.encode() if isinstance(input, str) else input or b""

        async def work() -> Execution | None:
            identity = users.usual(user) or await self._added(user or "")
            if identity is None:
                return None
            return await carry_out(
                self._sandbox,
                cmd,
                keep_bytes=keep,
                timeout_s=timeout,
                input=data,
                cwd=cwd,
                env={**identity.env, **(env or {})},
                user=identity.user,
            )

        try:
            async with _turn(concurrency):
                execution = await self._reached(work())
        except InvalidRequest as error:
            return _not_started(error)
        if execution is None:
            return ExecResult(False, 126, "", f"there is no user {user!r} in /etc/passwd\n")
        return _result(execution, timeout)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        await self._reached(self._files.write(file, data))

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            data = await elsewhere(self._files.read(file, limit_bytes=limit))
        except LimitReached as error:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from error
        except Unavailable as error:
            raise SandboxUnavailableError(error.message) from error
        return data.decode() if text else data

    async def _reached(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work in the sandbox; if the sandbox is the reason why it cannot be done, say so in inspect_ai's words."""
        try:
            return await elsewhere(work)
        except (Unavailable, LimitReached) as error:
            raise SandboxUnavailableError(error.message) from error

    async def _added(self, user: str) -> users.Identity | None:
        if not self._adds_users:
            raise SandboxUserUnsupportedError(f"this sandbox has the users agent and root, and no {user!r}")
        return await users.added(self._sandbox, user)


def _turn(wanted: bool) -> AbstractAsyncContextManager[object]:
    return concurrency("skep", _AT_ONCE) if wanted else nullcontext()


def _not_started(error: InvalidRequest) -> ExecResult[str]:
    code = refused_with(error)
    if code == 126:
        raise PermissionError(errno.EACCES, error.message) from error
    return ExecResult(False, code, "", f"{error.message}\n")


def _result(execution: Execution, timeout_s: int | None) -> ExecResult[str]:
    printed = execution.text + execution.error_text
    if execution.truncated:
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, printed)
    if execution.limit == "time":
        late = TimeoutError(f"the command was not done after {timeout_s} s")
        late.truncated_output = printed  # type: ignore[attr-defined]  # inspect_ai looks for it there
        raise late
    return ExecResult(execution.ok, execution.exit_code, execution.text, execution.error_text)
