"""Stacks of folders are read exactly as the kernel's overlay shows them."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.workspace.kernel_view import View, kernel_view

from skep.sandbox.erase import erase
from skep.workspace.layers.overlay import Change, Entry, Walk, changes, cover, merged, opened, pierce

NAMES = ["a", "b", "b-", "c", os.fsdecode(b"\xff\xfe"), "é", " \n"]

Node = dict[str, Any]

files = st.builds(
    lambda text, mode: {"kind": "file", "text": text, "mode": mode},
    st.sampled_from(["", "one", "two", "x" * 5000]),
    st.sampled_from([0o644, 0o755, 0o000, 0o600]),
)
links = st.builds(lambda target: {"kind": "link", "target": target}, st.sampled_from(["a", "/etc/passwd", "../.."]))
whiteouts = st.just({"kind": "whiteout"})
whiteouts_by_attribute = st.just({"kind": "whiteout by attribute"})


def folders_of(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.builds(
        lambda children, opaque, mode: {"kind": "folder", "children": children, "opaque": opaque, "mode": mode},
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
        st.sampled_from(["", "", "y"]),
        st.sampled_from([0o755, 0o755, 0o700, 0o000, 0o400]),
    )


def stacks_of(*leaves: st.SearchStrategy[Node]) -> st.SearchStrategy[list[dict[str, Node]]]:
    nodes = st.recursive(st.one_of(*leaves), folders_of, max_leaves=12)
    return st.lists(st.dictionaries(st.sampled_from(NAMES), nodes, max_size=6), min_size=1, max_size=4)


stacks = stacks_of(files, links, whiteouts)
odd_stacks = stacks_of(files, links, whiteouts, whiteouts_by_attribute)


def make(folder: Path, children: dict[str, Node]) -> str:
    """Build a layer on the disk."""
    folder.mkdir()
    kinds = {child["kind"] for child in children.values()}
    if kinds & {"whiteout", "whiteout by attribute"}:
        os.setxattr(folder, "user.overlay.origin", b"")
    if "whiteout by attribute" in kinds:
        os.setxattr(folder, "user.overlay.opaque", b"x")
    for name, node in children.items():
        path = folder / name
        match node["kind"]:
            case "file":
                path.write_text(node["text"])
                path.chmod(node["mode"])
            case "link":
                path.symlink_to(node["target"])
            case "whiteout":
                os.mknod(path, stat.S_IFCHR, 0)
            case "whiteout by attribute":
                path.touch()
                os.setxattr(path, "user.overlay.whiteout", b"")
            case "folder":
                make(path, node["children"])
                if node["opaque"]:
                    os.setxattr(path, "user.overlay.opaque", b"y")
                path.chmod(node["mode"])
    return str(folder)


def make_all(place: Path, specifications: Sequence[dict[str, Node]], prefix: str = "l") -> list[str]:
    stack = []
    for number, children in enumerate(specifications):
        stack.append(make(place / f"{prefix}{number}", children))
        # The kernel looks for files that are whiteouts only where the uppermost folder says so.
        os.setxattr(stack[-1], "user.overlay.opaque", b"x")
    return stack


@contextmanager
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="skep-overlay-"))
    try:
        yield path
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", str(path)], check=True)
        shutil.rmtree(path)


def shown(entries: Iterator[Entry]) -> View:
    """Describe entries as the kernel's view is described."""
    return {entry.path: described(entry) for entry in entries}


def described(entry: Entry) -> list[object]:
    mode = stat.S_IMODE(entry.stat.st_mode)
    if entry.kind == "file":
        with open(opened(entry), "rb") as file:
            return ["file", mode, hashlib.sha256(file.read()).hexdigest()]
    return ["link", str(Path(entry.host).readlink())] if entry.kind == "link" else [entry.kind, mode]


def squash(stack: Sequence[str], into: Path, over: Sequence[str] | None = None) -> str:
    """Make one layer of a stack, marks and all."""
    into.mkdir()
    shut = []
    for entry in merged(stack, over=over):
        target = into / entry.path
        if entry.kind == "folder":
            target.mkdir()
            shut.append((target, stat.S_IMODE(entry.stat.st_mode)))
            if entry.opaque:
                with opened_folder(target) as fd:
                    cover(fd)
        elif entry.kind == "whiteout":
            with opened_folder(target.parent) as fd:
                pierce(fd, target.name)
        elif entry.kind == "link":
            target.symlink_to(str(Path(entry.host).readlink()))
        else:
            with open(opened(entry), "rb") as file:
                target.write_bytes(file.read())
            target.chmod(stat.S_IMODE(entry.stat.st_mode))
    for target, mode in reversed(shut):
        target.chmod(mode)
    return str(into)


@contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


hard = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@hard
@given(odd_stacks)
def test_shows_what_the_kernel_shows(specification: list[dict[str, Node]]) -> None:
    with place() as folder:
        stack = make_all(folder, specification)
        assert shown(merged(stack, over=())) == without_phantoms(kernel_view(folder, stack))


@hard
@given(odd_stacks, stacks, st.booleans())
def test_one_layer_made_of_several_shows_the_same_over_whatever_lies_below(
    upper: list[dict[str, Node]], lower: list[dict[str, Node]], known: bool
) -> None:
    with place() as folder:
        above, below = make_all(folder, upper), make_all(folder, lower, "b")
        one = squash(above, folder / "one", below if known else None)
        assert kernel_view(folder, [one, *below]) == without_phantoms(kernel_view(folder, [*above, *below]))


@hard
@given(stacks, stacks, stacks)
def test_changes_are_what_differs_between_what_the_kernel_shows(
    older: list[dict[str, Node]], newer: list[dict[str, Node]], shared: list[dict[str, Node]]
) -> None:
    with place() as folder:
        tail = make_all(folder, shared, "s")
        before, after = [*make_all(folder, older, "o"), *tail], [*make_all(folder, newer, "n"), *tail]
        was, now = shown(merged(before, over=())), shown(merged(after, over=()))
        expected = {path for path in was.keys() | now.keys() if was.get(path) != now.get(path)}
        found = list(changes(after, before))
        assert {change.path for change in found} == expected
        assert all(verb_of(change, was, now) == change.verb for change in found)
        assert len(found) == len(expected)


def without_phantoms(view: View) -> View:
    """Leave out names that the kernel lists and yet has nothing by: some whiteouts by attribute."""
    return {path: what for path, what in view.items() if what != ["phantom"]}


def test_the_whiteouts_that_are_made_leave_no_names_in_listings(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    for name in ("made", "bare"):
        (layer / name).mkdir(parents=True)
    with opened_folder(layer / "made") as fd:
        pierce(fd, "gone")
    os.mknod(layer / "bare" / "gone", stat.S_IFCHR, 0)
    view = kernel_view(tmp_path, [str(layer)])
    assert view == {"made": ["folder", 0o755], "bare": ["folder", 0o755], "bare/gone": ["phantom"]}


def test_only_marks_that_something_below_needs_are_told(tmp_path: Path) -> None:
    hides = {"kind": "folder", "opaque": "y", "mode": 0o755, "children": {"w": {"kind": "whiteout"}}}
    stack = make_all(tmp_path, [{"d": hides, "e": hides, "w": {"kind": "whiteout"}, "v": {"kind": "whiteout"}}])
    below = make_all(tmp_path, [{"d": {**hides, "opaque": ""}, "w": {"kind": "file", "text": "", "mode": 0o644}}], "b")
    assert [(entry.path, entry.kind, entry.opaque) for entry in merged(stack, over=below)] == [
        ("d", "folder", True),
        ("e", "folder", False),
        ("w", "whiteout", False),
    ]
    assert [entry.path for entry in merged(stack)] == ["d", "e", "v", "w"]
    assert [entry.path for entry in merged(stack, over=())] == ["d", "e"]


def test_a_tree_deeper_than_any_path_and_shut_at_every_level_is_read_to_its_end(tmp_path: Path) -> None:
    depth = 3000
    top = tmp_path / "layer"
    top.mkdir()
    fds = [os.open(top, os.O_RDONLY)]
    for _ in range(depth):
        os.mkdir("deep", 0o755, dir_fd=fds[-1])
        fds.append(os.open("deep", os.O_RDONLY, dir_fd=fds[-1]))
        if len(fds) > 2:
            os.fchmod(fds[-2], 0)
            os.close(fds.pop(-2))
    with open(os.open("end", os.O_WRONLY | os.O_CREAT, 0o000, dir_fd=fds[-1]), "w") as end:
        end.write("the end")
    for fd in fds:
        os.close(fd)
    try:
        with Walk([str(top)]) as walk:
            *path, last = walk
            with open(opened(last), "rb") as file:
                assert file.read() == b"the end"
        assert len(path) == depth
        assert path[-2].stat.st_mode & 0o777 == 0
        assert [entry.stat.st_mode for entry in merged([str(top)])] == [entry.stat.st_mode for entry in [*path, last]]
    finally:
        erase(str(top), top.stat().st_ino)


def test_a_walk_that_is_left_in_the_middle_gives_folders_their_modes_back(tmp_path: Path) -> None:
    shut = {"kind": "folder", "opaque": "", "mode": 0o000, "children": {"f": {"kind": "file", "text": "", "mode": 0o0}}}
    stack = make_all(tmp_path, [{"a": {**shut, "children": {"b": shut}}}])
    walk = merged(stack)
    assert [next(walk).path for _ in range(3)] == ["a", "a/b", "a/b/f"]
    walk.close()  # type: ignore[attr-defined]
    assert [entry.stat.st_mode & 0o777 for entry in merged(stack)] == [0, 0, 0]


def test_links_are_shown_and_never_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text("not in the stack")
    (tmp_path / "layer").mkdir()
    (tmp_path / "layer" / "folder").symlink_to(secret)
    [entry] = merged([str(tmp_path / "layer")])
    assert (entry.path, entry.kind) == ("folder", "link")
    inside = Entry("folder/file", "file", entry.layer, (secret / "file").stat())
    assert Path(inside.host).read_text() == "not in the stack"  # the control: a plain path leads there
    with pytest.raises(NotADirectoryError):
        opened(inside)


def test_a_pipe_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    [entry] = merged([str(tmp_path)])
    assert entry.kind == "other"
    with pytest.raises(OSError, match="not a regular file"):
        opened(entry)


def test_names_of_one_file_share_their_identity(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("same")
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    one, two = merged([str(tmp_path)])
    assert (one.stat.st_dev, one.stat.st_ino, one.stat.st_nlink) == (two.stat.st_dev, two.stat.st_ino, 2)


def test_a_file_touched_or_copied_has_not_changed(tmp_path: Path) -> None:
    spec = {"f": {"kind": "file", "text": "one", "mode": 0o644}}
    [below, above] = make_all(tmp_path, [spec, spec])
    os.utime(f"{above}/f", (1, 1))
    assert list(changes([above, below], [below])) == []
    Path(above, "f").write_text("two")
    [change] = changes([above, below], [below])
    assert (change.path, change.verb) == ("f", "changed")


def verb_of(change: Change, was: View, now: View) -> str:
    if change.path not in was:
        return "added"
    return "changed" if change.path in now else "removed"
