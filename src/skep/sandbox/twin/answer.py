"""What a twin answers to a question, checked before anybody uses it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from skep.errors import SandboxLost
from skep.sandbox.twin.inside import wire
from skep.sandbox.twin.inside.wire import Violation

#: What a list of a hundred thousand long names takes.
_ANSWER_LIMIT = 64 << 20


def _bytes_alone(text: str) -> str:
    if (not text.isascii() and max(text) > "\xff") or "\0" in text:
        raise ValueError("characters that no path has")
    return text


def _one_name(text: str) -> str:
    # Whoever copies a folder out joins its names to a path of their own.
    if text in ("", "..") or "/" in text:
        raise ValueError("not the name of one thing")
    return text


def _below(text: str) -> str:
    if text.startswith("/") or ".." in text.split("/"):
        raise ValueError("not a path below a folder")
    return text


Path = Annotated[str, Field(max_length=4096), AfterValidator(_bytes_alone)]
Name = Annotated[Path, AfterValidator(_one_name)]
Below = Annotated[Path, AfterValidator(_below)]
Happened = Literal["created", "modified", "removed", "overflow"]
Whole = Annotated[int, Field(strict=True, ge=-(1 << 63), lt=1 << 63)]


class Failure(BaseModel):
    """Why an act on a file could not be: the kernel's word, or the twin's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    errno: Annotated[int, Field(strict=True, ge=0, lt=4096)] = 0
    why: Literal["folder", "special", "linked", "proc", "large", "many"] | None = None
    detail: Whole = 0


#: Name, kind, size, mode, when it was changed, where it points.
Found = tuple[
    Name, Literal["file", "folder", "link", "other"], Whole, Annotated[int, Field(strict=True, ge=0, lt=0o10000)],
    Annotated[float, Field(allow_inf_nan=False)], Path | None,
]  # fmt: skip
FOUND: TypeAdapter[Found] = TypeAdapter(Found)
LISTED: TypeAdapter[list[Found]] = TypeAdapter(Annotated[list[Found], Field(max_length=100_000)])
CHANGED: TypeAdapter[list[tuple[Happened, Below]]] = TypeAdapter(
    Annotated[list[tuple[Happened, Below]], Field(max_length=4096)]
)
NUMBER: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(strict=True, ge=0, lt=1 << 63)])


class Answer:
    """Waits for one answer, with what came before it."""

    def __init__(self) -> None:
        self._told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: Failure | None = None
        self.value = b""
        self.data = bytearray()

    async def given(self) -> Answer:
        await self._told
        return self

    def hear(self, kind: int, payload: bytes) -> None:
        if self._told.done() and not self._told.cancelled():
            raise Violation("its twin answered twice")
        match kind:
            case wire.DATA if len(self.data) + len(payload) <= _ANSWER_LIMIT:
                self.data += payload[wire.STREAM.size :]
            case wire.DONE:
                self.value = payload
                self._settle()
            case wire.FAILED:
                self.failure = read(Failure, payload)
                self._settle()
            case _:
                raise Violation("its twin said something that it never says")

    def lose(self) -> None:
        if not self._told.done():
            self._told.set_exception(SandboxLost("the sandbox is gone", hint="resolve the session or try again"))
            self._told.exception()  # nobody may be waiting for this one

    def _settle(self) -> None:
        if not self._told.done():
            self._told.set_result(None)


def read(form: Any, payload: bytes | bytearray) -> Any:
    """Return what a payload says, given the form it must have."""
    check = form.validate_json if isinstance(form, TypeAdapter) else form.model_validate_json
    try:
        return check(payload)
    except ValidationError as error:
        raise Violation("its twin said something that has no meaning") from error
