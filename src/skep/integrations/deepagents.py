"""Skep's sandboxes for LangChain's deepagents: `create_deep_agent(model, backend=SkepBackend())`."""

from __future__ import annotations

import asyncio
import base64
import os
import posixpath
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Any, Self, TypeVar

from skep.errors import InvalidRequest, LimitReached, SandboxLost
from skep.integrations.command import carry_out, refused_with
from skep.integrations.extra import extra
from skep.integrations.filesystem import HOME, Filesystem
from skep.integrations.standby import Standby, ended
from skep.sandbox.blocking import elsewhere, wait
from skep.sandbox.egress.network import Network
from skep.sandbox.files import Entry
from skep.sandbox.limits import MIB, Limits
from skep.sandbox.sandbox import Execution, Sandbox

with extra("deepagents", brings="deepagents"):
    from deepagents.backends.protocol import (
        DeleteResult,
        EditResult,
        ExecuteResponse,
        FileData,
        FileDownloadResponse,
        FileInfo,
        FileOperationError,
        FileUploadResponse,
        GlobResult,
        LsResult,
        ReadResult,
        WriteResult,
    )
    from deepagents.backends.sandbox import BaseSandbox
    from deepagents.backends.utils import perform_string_replacement, slice_read_response

__all__ = ["SkepBackend"]

T = TypeVar("T")

#: How long a command may take that says nothing about it, and what it may print.
_TIMEOUT_S = 120
_KEEP_BYTES = 10 * MIB
#: Larger files are paged inside the sandbox, as deepagents does it.
_READ_BYTES = 8 * MIB
_ERRORS: dict[type[OSError], FileOperationError] = {
    FileNotFoundError: "file_not_found",
    PermissionError: "permission_denied",
    IsADirectoryError: "is_directory",
}


class SkepBackend(BaseSandbox):
    """A sandbox that starts with the first use, for sync and async agents alike.

    `folder` is the workspace on this machine; without one it is thrown away at the end. `adopt` hands the files that
    are in it over to the sandbox's own user, which is needed once as root. `network` lists the hosts that may be
    reached. Use `with`, or `close` it; it ends with the process at the latest.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        adopt: bool = False,
        network: Sequence[str] = (),
        mechanism: str = "bubblewrap",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        options: Mapping[str, Any] | None = None,
        timeout_s: int = _TIMEOUT_S,
    ) -> None:
        def make() -> AbstractAsyncContextManager[Sandbox]:
            return Sandbox.create(
                folder,
                adopt=adopt,
                network=Network.to(*network) if network else None,
                mechanism=mechanism,
                env=env,
                limits=limits,
                options=options,
            )

        self._standby = Standby(make)
        self._timeout_s = timeout_s
        self._editing = asyncio.Lock()
        # Not at the exit of the process: no thread can be started by then. The sandbox ends with the process anyway.
        weakref.finalize(self, _end, self._standby).atexit = False

    @property
    def id(self) -> str:
        return wait(self._standby.sandbox()).id

    def close(self) -> None:
        """End the sandbox; safe to repeat."""
        wait(self._standby.close())

    async def aclose(self) -> None:
        await ended(self._standby)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return wait(self._execute(command, timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:  # noqa: ASYNC109
        return await elsewhere(self._execute(command, timeout))

    def ls(self, path: str) -> LsResult:
        return wait(self._ls(path))

    async def als(self, path: str) -> LsResult:
        return await elsewhere(self._ls(path))

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        try:
            return wait(self._read(file_path, offset, limit))
        except LimitReached:
            return super().read(file_path, offset, limit)

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        try:
            return await elsewhere(self._read(file_path, offset, limit))
        except LimitReached:
            return await super().aread(file_path, offset, limit)

    def write(self, file_path: str, content: str) -> WriteResult:
        return wait(self._write(file_path, content))

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        return await elsewhere(self._write(file_path, content))

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return wait(self._edit(file_path, old_string, new_string, replace_all))

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return await elsewhere(self._edit(file_path, old_string, new_string, replace_all))

    def delete(self, file_path: str) -> DeleteResult:
        return wait(self._delete(file_path))

    async def adelete(self, file_path: str) -> DeleteResult:
        return await elsewhere(self._delete(file_path))

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        return super().glob(pattern, path or HOME)

    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        return await super().aglob(pattern, path or HOME)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return wait(self._upload(files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return await elsewhere(self._upload(files))

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return wait(self._download(paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return await elsewhere(self._download(paths))

    # What follows runs on the loop that waiting calls share.

    async def _with_files(self, act: Callable[[Filesystem], Awaitable[T]]) -> T:
        return await self._standby.do(lambda sandbox: act(Filesystem(sandbox.files)))

    async def _execute(self, command: str, timeout_s: int | None) -> ExecuteResponse:
        # Both streams into one, in the order in which they are printed; on a line of its own, so that it holds even
        # where the shell cannot make sense of the command.
        argv = ["/bin/bash", "-c", f"exec 2>&1\n{command}"]
        seconds = self._timeout_s if timeout_s is None else timeout_s
        keep, timeout_s = _KEEP_BYTES, seconds or None
        try:
            ran = await self._standby.do(lambda sandbox: carry_out(sandbox, argv, keep_bytes=keep, timeout_s=timeout_s))
        except InvalidRequest as error:
            return ExecuteResponse(f"Error: {error.message}", refused_with(error))
        except SandboxLost:
            return ExecuteResponse(
                "Error: the sandbox died under the command. The next one starts in a new sandbox.", 1
            )
        return _response(ran, seconds)

    async def _ls(self, path: str) -> LsResult:
        try:
            entries = await self._with_files(lambda files: files.list(path))
        except OSError as error:
            return LsResult(error=f"Path '{path}': {error.strerror}")
        return LsResult(entries=[_info(path, entry) for entry in entries])

    async def _read(self, path: str, offset: int, limit: int) -> ReadResult:
        try:
            data = await self._with_files(lambda files: files.read(path, limit_bytes=_READ_BYTES))
        except OSError as error:
            return ReadResult(error=f"File '{path}': {error.strerror}")
        return _page(data, offset, limit)

    async def _write(self, path: str, content: str) -> WriteResult:
        try:
            await self._with_files(lambda files: files.write(path, content.encode()))
        except OSError as error:
            return WriteResult(error=f"Failed to write file '{path}': {error.strerror}")
        return WriteResult(path=path)

    async def _edit(self, path: str, old: str, new: str, everywhere: bool) -> EditResult:
        async with self._editing:
            try:
                data = await self._with_files(lambda files: files.read(path))
                edited = _edited(data.decode(), old, new, everywhere)
                if isinstance(edited, str):
                    return EditResult(error=edited)
                text, occurrences = edited
                await self._with_files(lambda files: files.write(path, text.encode()))
            except UnicodeDecodeError:
                return EditResult(error=f"Error: File '{path}' is not a text file")
            except LimitReached as error:
                return EditResult(error=f"Error editing file '{path}': {error.message}")
            except OSError as error:
                return EditResult(error=f"Error editing file '{path}': {error.strerror}")
            return EditResult(path=path, occurrences=occurrences)

    async def _delete(self, path: str) -> DeleteResult:
        try:
            await self._with_files(lambda files: files.remove(path))
        except OSError as error:
            return DeleteResult(error=f"Error deleting file '{path}': {error.strerror}")
        return DeleteResult(path=path)

    async def _upload(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path, await self._upload_one(path, data)) for path, data in files]

    async def _upload_one(self, path: str, data: bytes) -> str | None:
        if not path.startswith("/"):
            return "invalid_path"
        try:
            await self._with_files(lambda files: files.write(path, data))
        except OSError as error:
            return _code(error)
        return None

    async def _download(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [await self._download_one(path) for path in paths]

    async def _download_one(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path, error="invalid_path")
        try:
            return FileDownloadResponse(path, await self._with_files(lambda files: files.read(path)))
        except OSError as error:
            return FileDownloadResponse(path, error=_code(error))
        except LimitReached as error:
            return FileDownloadResponse(path, error=error.message)


def _end(standby: Standby) -> None:
    ending = threading.Thread(target=lambda: wait(standby.close()))
    ending.start()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        ending.join()  # else it is garbage that was collected in the middle of a loop, perhaps the one to wait for


def _response(ran: Execution, timeout_s: int) -> ExecuteResponse:
    if ran.limit == "time":
        late = f"Error: the command was not done after {timeout_s} seconds, and was ended."
        return ExecuteResponse(f"{ran.text}\n{late}".lstrip(), 124)
    return ExecuteResponse(ran.text, ran.exit_code, truncated=ran.truncated)


def _info(folder: str, entry: Entry) -> FileInfo:
    return FileInfo(
        path=posixpath.join(folder, entry.name),
        is_dir=entry.kind == "folder",
        size=entry.size,
        modified_at=datetime.fromtimestamp(entry.modified_at, UTC).isoformat(),
    )


def _page(data: bytes, offset: int, limit: int) -> ReadResult:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return ReadResult(file_data=FileData(content=base64.b64encode(data).decode(), encoding="base64"))
    return slice_read_response(FileData(content=text, encoding="utf-8"), offset, limit)


def _edited(text: str, old: str, new: str, everywhere: bool) -> tuple[str, int] | str:
    """Replace a text, whose lines end as the model has seen them, which is not always how they end in the file."""
    said = perform_string_replacement(text, old, new, everywhere)
    if old not in text and (theirs := old.replace("\n", "\r\n")) in text:
        return perform_string_replacement(text, theirs, new.replace("\n", "\r\n"), everywhere)
    return said


def _code(error: OSError) -> str:
    return _ERRORS.get(type(error)) or error.strerror or "invalid_path"
