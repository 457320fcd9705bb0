"""What a container's root is made of: nearly nothing, a root file system by path, or an image by name.

Images made here are imported once and named by what is in them, so no registry is needed and none is looked for.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from skep.errors import InvalidRequest, NotFound, SandboxUnusable
from skep.sandbox.containers.engine import Engine
from skep.sandbox.leftovers import records_folder

#: The folders of the image that only gives the host's own something to be shown on; a mount takes over their mode.
_PLAIN = ("cache", "dev", "etc", "proc", "run", "run/skep", "sys", "workspace")
_FOLDERS = {"tmp": 0o1777, **dict.fromkeys(_PLAIN, 0o755)}
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the engine has, with the environment that it wants its programs to have."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)


async def bare_image(engine: Engine, links: Mapping[str, str]) -> Image:
    """Return the image with empty folders and these links, made if it is missing."""
    data = _skeleton(links)
    tag = hashlib.sha256(data).hexdigest()[:16]
    return await engine.ask(lambda api: _imported(api, f"skep-bare:{tag}", lambda: io.BytesIO(data)))


async def rootfs_image(engine: Engine, path: str) -> Image:
    """Return the image of a root file system, a folder or a tar file, made if it is missing."""
    return await engine.ask(lambda api: _of_rootfs(api, path))


async def named_image(engine: Engine, name: str) -> Image:
    """Return an image by its name, pulled if it is missing."""
    return await engine.ask(lambda api: _named(api, name))


def _skeleton(links: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, mode in _FOLDERS.items():
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            archive.addfile(folder)
        for inside, target in sorted(links.items()):
            link = tarfile.TarInfo(inside.lstrip("/"))
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    return out.getvalue()


def _imported(api: Any, name: str, opened: Any) -> Image:
    with _alone():
        found = _found(api, name)
        if found is None:
            repository, _, tag = name.partition(":")
            with opened() as archive:
                said = api.import_image_from_data(archive, repository=repository, tag=tag)
            found = _found(api, name)
            if found is None:
                raise SandboxUnusable(f"the engine did not import {name}: {said}", hint="look into the engine's log")
    return Image(name, _environment(found))


@contextmanager
def _alone() -> Iterator[None]:
    """Keep two processes from importing the same thing twice."""
    lock = os.open(records_folder() / "images.lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _found(api: Any, name: str) -> Any:
    from docker.errors import ImageNotFound
    from docker.errors import NotFound as Missing

    try:
        return api.inspect_image(name)
    except (ImageNotFound, Missing):
        return None


def _environment(found: Any) -> dict[str, str]:
    config = found.get("Config") or {}
    return dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)


def _named(api: Any, name: str) -> Image:
    found = _found(api, name)
    if found is None:
        _pull(api, name)
        found = api.inspect_image(name)
    if volumes := (found.get("Config") or {}).get("Volumes"):
        raise InvalidRequest(
            f"the image {name!r} keeps {', '.join(sorted(volumes))} in volumes, whose size nothing limits",
            hint="export its root file system (`docker export`) and give the tar file as rootfs",
        )
    return Image(name, _environment(found))


def _pull(api: Any, name: str) -> None:
    from docker.errors import APIError

    said = ""
    try:
        for line in api.pull(name, stream=True, decode=True):
            said = str(line.get("error", said))
    except APIError as error:
        said = str(error.explanation or error)
    if not said:
        return
    if any(words in said for words in ("not found", "does not exist", "manifest unknown", "invalid reference")):
        raise NotFound(f"there is no image {name!r}: {said}", hint="check its name, or import a rootfs by path")
    raise SandboxUnusable(
        f"the image {name!r} is not here and cannot be pulled: {said}",
        hint="load it (`docker load`), give a root file system by path as rootfs, or use the host's own programs",
    )


def _of_rootfs(api: Any, path: str) -> Image:
    try:
        found = os.stat(path)
        is_folder = stat.S_ISDIR(found.st_mode)
        tag = _fingerprint(path) if is_folder else _digest(path)
        return _imported(api, f"skep-rootfs:{tag[:16]}", lambda: _packed(path) if is_folder else open(path, "rb"))
    except (PermissionError, FileNotFoundError, tarfile.TarError) as error:
        raise InvalidRequest(
            f"{path!r} cannot be used as a root file system: {error}", hint="give a folder or a tar file you can read"
        ) from error


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _fingerprint(path: str) -> str:
    """Name a folder by what its files are and when they changed: to read all of it each time would take long."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(path, onerror=_raise):
        folders.sort()
        for name in sorted((*folders, *files)):
            full = os.path.join(folder, name)
            found = os.lstat(full)
            target = os.readlink(full) if stat.S_ISLNK(found.st_mode) else ""
            entry = (os.path.relpath(full, path), found.st_mode, found.st_uid, found.st_gid, target)
            changed = () if stat.S_ISDIR(found.st_mode) else (found.st_size, found.st_mtime_ns)
            digest.update(repr((*entry, *changed)).encode())
    return digest.hexdigest()


def _packed(path: str) -> IO[bytes]:
    packed = tempfile.TemporaryFile(prefix="skep-rootfs-")  # noqa: SIM115 - the caller closes it
    try:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(path, arcname=".")
        packed.seek(0)
    except BaseException:
        packed.close()
        raise
    return packed


def _raise(error: OSError) -> None:
    raise error
