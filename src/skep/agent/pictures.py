"""Pictures that tools yield: files of the workspace, which a model that reads images is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skep.agent.desk import Desk
from skep.errors import LimitReached, NotFound, SkepError
from skep.models.sight import MOST_BYTES, TYPES, Picture
from skep.sessions.sniff import HEAD_BYTES, media_type

if TYPE_CHECKING:
    from skep.sandbox.files import Files


def picture_type(head: bytes) -> str | None:
    """Return the type of a picture that can be shown, by the beginning of its file; None for anything else."""
    found = media_type(head[:HEAD_BYTES])
    return found if found in TYPES else None


async def look(desk: Desk, paths: Sequence[str]) -> Mapping[str, Picture | str]:
    """Read pictures; in place of one that cannot be shown there is the reason."""
    try:
        async with (await desk.computer()).files() as files:
            return {path: await _read(files, path) for path in paths}
    except SkepError as error:
        return dict.fromkeys(paths, error.message)


async def _read(files: Files, path: str) -> Picture | str:
    try:
        data = await files.read(path, limit_bytes=MOST_BYTES)
    except NotFound:
        return "it is not there any more"
    except LimitReached:
        return f"it is larger than {MOST_BYTES:,} bytes"
    kind = picture_type(data)
    return Picture(kind, data) if kind else f"it is none of {', '.join(TYPES)}"
