"""What has changed between two states of a workspace, as a person wants to read it.

Files are named with their sizes, and small texts line by line; a file that only moved is said to have moved. What lies
in `.venv` and `node_modules` is summed up as packages that came, went or changed their version.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Literal

from pydantic import BaseModel, ConfigDict

from skep.workspace.faults import explained
from skep.workspace.layers.cursor import Cursor
from skep.workspace.layers.overlay import Change, Entry, changes, opened
from skep.workspace.package_change import ENVIRONMENTS, PackageChange, package_changes

_MOST_FILES = 10_000
#: Texts up to this are compared line by line, until so much has been shown.
_TEXT_BYTES = 64 << 10
_ALL_TEXT_CHARS = 1 << 20
#: A file that moved is recognised up to this size.
_MOVED_BYTES = 64 << 20
_BLOCK = 1 << 20

Verb = Literal["added", "changed", "removed", "moved"]


class FileChange(BaseModel):
    """One file, or an empty folder, that is not what it was. `was` is the old path of one that moved."""

    model_config = ConfigDict(frozen=True)

    path: str
    verb: Verb
    kind: Literal["file", "folder", "link", "other"]
    before_bytes: int | None = None
    after_bytes: int | None = None
    #: Permissions before and after, where they differ.
    modes: tuple[int, int] | None = None
    was: str | None = None
    #: The lines that changed; None for what is binary, large or not a file.
    lines: str | None = None
    binary: bool = False


class Diff(BaseModel):
    """All differences between two states."""

    model_config = ConfigDict(frozen=True)

    files: tuple[FileChange, ...] = ()
    packages: tuple[PackageChange, ...] = ()
    #: How many files of the environments are different, whatever the packages say.
    environment_files: int = 0
    #: How many more files have changed than are listed.
    unlisted: int = 0

    @property
    def empty(self) -> bool:
        return not (self.files or self.packages or self.environment_files)

    def text(self) -> str:
        """Render it for reading."""
        if self.empty:
            return "nothing has changed\n"
        lines = [line for change in self.files for line in _rendered(change)]
        if self.unlisted:
            lines.append(f"… and {self.unlisted:,} more files")
        lines += [package.text() for package in self.packages]
        if self.environment_files and not self.packages:
            lines.append(f"{self.environment_files:,} files of the environment have changed, but no package")
        return "\n".join([*lines, _summary(self), ""])


def compare(older: Sequence[str], newer: Sequence[str]) -> Diff:
    """Compare what two stacks of folders show."""
    with explained("a state of the workspace"):
        own: list[Change] = []
        environment: list[Change] = []
        for change in changes(newer, older):
            (environment if change.path.split("/", 1)[0] in ENVIRONMENTS else own).append(change)
        told = _without_plain_folders(own)
        files = [*_moves(told)]
        moved = {path for change in files for path in (change.path, change.was)}
        reader = _Lines()
        listed = [change for change in told if shown(change.path) not in moved][:_MOST_FILES]
        files += [reader.describe(change) for change in listed]
        return Diff(
            files=tuple(sorted(files, key=lambda change: change.path)),
            packages=tuple(package_changes(environment)),
            environment_files=sum(_entry(change).kind != "folder" for change in environment),
            unlisted=max(len(told) - len(moved) - len(listed), 0),
        )


def shown(path: str) -> str:
    """Return a path as text that can be printed: bytes that are no text, and control characters, are spelled out."""
    text = os.fsencode(path).decode(errors="backslashreplace")
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _entry(change: Change) -> Entry:
    entry = change.after or change.before
    assert entry is not None
    return entry


def _without_plain_folders(all_changes: list[Change]) -> list[Change]:
    """Leave out folders that something else in the list speaks for."""
    above = {change.path.rpartition("/")[0] for change in all_changes}

    def matters(change: Change) -> bool:
        if _entry(change).kind != "folder" or change.path not in above:
            return True
        return change.verb == "changed"

    return [change for change in all_changes if matters(change)]


def _moves(told: list[Change]) -> Iterable[FileChange]:
    """Find files that are gone in one place and have come in another."""
    removed = _by_content(change for change in told if change.verb == "removed")
    added = _by_content((change for change in told if change.verb == "added"), among={key[0] for key in removed})
    for key, comers in added.items():
        for gone, comer in zip(removed.get(key, ()), comers, strict=False):
            size = _entry(comer).stat.st_size
            yield FileChange(
                path=shown(comer.path),
                verb="moved",
                kind="file",
                was=shown(gone.path),
                before_bytes=size,
                after_bytes=size,
            )


def _by_content(some: Iterable[Change], among: set[int] | None = None) -> dict[tuple[int, bytes], list[Change]]:
    found: dict[tuple[int, bytes], list[Change]] = {}
    for change in some:
        entry = _entry(change)
        size = entry.stat.st_size
        if entry.kind == "file" and 0 < size <= _MOVED_BYTES and (among is None or size in among):
            found.setdefault((size, _digest(entry)), []).append(change)
    return found


def _digest(entry: Entry) -> bytes:
    digest = hashlib.sha256()
    with open(opened(entry), "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.digest()


class _Lines:
    """Describes changes, with the lines of texts until enough has been shown."""

    def __init__(self) -> None:
        self._left = _ALL_TEXT_CHARS

    def describe(self, change: Change) -> FileChange:
        before, after = change.before, change.after
        entry = _entry(change)
        texts = [self._read(side) for side in (before, after)]
        binary = any(text is not None and _is_binary(text) for text in texts)
        return FileChange(
            path=shown(change.path),
            verb=change.verb,
            kind="other" if entry.kind == "whiteout" else entry.kind,
            before_bytes=before.stat.st_size if before and before.kind == "file" else None,
            after_bytes=after.stat.st_size if after and after.kind == "file" else None,
            modes=_modes(before, after),
            lines=None if binary else self._compared(texts),
            binary=binary,
        )

    def _read(self, entry: Entry | None) -> bytes | None:
        """Read a small file, or where a link leads; nothing for what is not there, None for what is not shown."""
        if entry is None:
            return b""
        if entry.kind == "link":
            return _target(entry) + b"\n"
        if entry.kind != "file" or entry.stat.st_size > _TEXT_BYTES or self._left <= 0:
            return None
        with open(opened(entry), "rb") as file:
            return file.read(_TEXT_BYTES)

    def _compared(self, texts: list[bytes | None]) -> str | None:
        old, new = texts
        if old is None or new is None or old == new:
            return None
        compared = difflib.unified_diff(_split(old), _split(new), n=2, lineterm="")
        lines = "\n".join(list(compared)[2:])
        self._left -= len(lines)
        return lines if self._left > 0 else None


def _target(entry: Entry) -> bytes:
    """Return where a link leads, without following another on the way to it."""
    *folders, name = entry.path.split("/")
    with closing(Cursor(entry.layer)) as cursor:
        for folder in folders:
            cursor.down(folder)
        return os.fsencode(os.readlink(name, dir_fd=cursor.fd))


def _is_binary(text: bytes) -> bool:
    try:
        return "\0" in text.decode()
    except UnicodeDecodeError:
        return True


def _split(text: bytes) -> list[str]:
    return [
        "".join(char if char.isprintable() or char == "\t" else ascii(char)[1:-1] for char in line)
        for line in text.decode().split("\n")
    ][: text.count(b"\n") + bool(text and not text.endswith(b"\n"))]


def _modes(before: Entry | None, after: Entry | None) -> tuple[int, int] | None:
    if before is None or after is None or "link" in (before.kind, after.kind):
        return None
    modes = stat.S_IMODE(before.stat.st_mode), stat.S_IMODE(after.stat.st_mode)
    return modes if modes[0] != modes[1] else None


_SIGNS: dict[Verb, str] = {"added": "+", "changed": "~", "removed": "-", "moved": ">"}


def _rendered(change: FileChange) -> Iterable[str]:
    name = change.path + ("/" if change.kind == "folder" else "")
    if change.was:
        name = f"{change.was} -> {name}"
    details = [_sizes(change), "binary" if change.binary else "", "link" if change.kind == "link" else ""]
    if change.modes:
        details.append(f"mode {change.modes[0]:03o} -> {change.modes[1]:03o}")
    said = ", ".join(filter(None, details))
    yield f"{_SIGNS[change.verb]} {name}" + (f"  ({said})" if said else "")
    if change.lines and change.verb == "changed":
        yield from (f"    {line}" for line in change.lines.split("\n"))


def _sizes(change: FileChange) -> str:
    before, after = change.before_bytes, change.after_bytes
    if before is not None and after is not None and before != after:
        return f"{_size(before)} -> {_size(after)}"
    known = after if after is not None else before
    return "" if known is None else _size(known)


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def _summary(diff: Diff) -> str:
    counts = {verb: sum(change.verb == verb for change in diff.files) for verb in _SIGNS}
    said = [f"{count} {verb}" for verb, count in counts.items() if count]
    if diff.packages:
        said.append(f"{len(diff.packages)} package{'s' if len(diff.packages) > 1 else ''}")
    return f"{', '.join(said) or 'environment only'}"
