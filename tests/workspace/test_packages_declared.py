"""What a workspace declares is read and changed without harm to what else its files hold."""

from __future__ import annotations

import json
import tomllib

import pytest

from skep.workspace.packages.declared import (
    PACKAGE_JSON,
    PACKAGE_LOCK,
    PYPROJECT,
    Broken,
    edit_package_json,
    edit_pyproject,
    fault,
    joined,
    node_name,
    read_package_json,
    read_pyproject,
    restored,
)
from skep.workspace.template.requirement import python_name

WRITTEN = b"""# top
[project]
name = "mine"  # and a remark
version = "2"
dependencies = [
    "apple<2",  # sweet
    "local @ file:///workspace/local",
]

[tool.ruff]
line-length = 99
"""


def test_packages_that_are_not_of_the_index_are_passed_over_and_stay() -> None:
    assert read_pyproject(WRITTEN) == ("apple<2",)
    edited = edit_pyproject(WRITTEN, add=["pear"])
    assert tomllib.loads(edited.decode())["project"]["dependencies"] == [
        "apple<2", "local @ file:///workspace/local", "pear"
    ]  # fmt: skip


def test_a_package_takes_the_place_of_the_one_by_its_name_however_it_is_spelled() -> None:
    edited = edit_pyproject(b'[project]\ndependencies = ["Big_Apple<2", "pear"]\n', add=["big-apple>=2"])
    assert read_pyproject(edited) == ("big-apple>=2", "pear")


def test_remarks_and_tables_stay() -> None:
    edited = edit_pyproject(WRITTEN, add=["apple>=2"], drop=["pear"]).decode()
    assert edited.startswith("# top\n")
    assert "# and a remark" in edited
    assert tomllib.loads(edited)["tool"] == {"ruff": {"line-length": 99}}


def test_what_is_dropped_is_no_longer_declared() -> None:
    assert read_pyproject(edit_pyproject(WRITTEN, drop=["apple"])) == ()


@pytest.mark.parametrize("text", [None, b"", b"[tool.x]\ny = 1\n", b'[project]\nname = "x"\n'])
def test_a_file_without_packages_gets_a_list_of_them(text: bytes | None) -> None:
    assert read_pyproject(edit_pyproject(text, add=["apple"])) == ("apple",)


def test_every_part_of_a_package_json_counts_and_stays() -> None:
    text = json.dumps(
        {
            "type": "module",
            "dependencies": {"a": "^1", "here": "file:../here"},
            "devDependencies": {"b": "2.x"},
            "optionalDependencies": {"@s/c": "latest"},
        }
    ).encode()
    assert read_package_json(text) == {"a": "^1", "b": "2.x", "@s/c": "latest"}
    edited = json.loads(edit_package_json(text, add={"a": "^2", "d": "*"}))
    assert edited["dependencies"] == {"a": "^2", "here": "file:../here", "d": "*"}
    assert (edited["type"], edited["devDependencies"]) == ("module", {"b": "2.x"})


BROKEN = [
    (PYPROJECT, b"[project"), (PYPROJECT, b"\xff"), (PYPROJECT, b"[project]\ndependencies = 'apple'\n"),
    (PYPROJECT, b"[project]\ndependencies = [1]\n"), (PYPROJECT, b"project = 3\n"), (PYPROJECT, b"a = 1\na = 2\n"),
    (PACKAGE_JSON, b""), (PACKAGE_JSON, b"{"), (PACKAGE_JSON, b"[]"), (PACKAGE_JSON, b'{"dependencies": []}'),
    (PACKAGE_JSON, b"[" * 100_000), (PACKAGE_LOCK, b'{"lock'), (PACKAGE_LOCK, b"3"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "text"), BROKEN, ids=lambda value: repr(value[:30]))
def test_a_broken_file_is_known_as_such(file: str, text: bytes) -> None:
    assert fault(file, text)


def test_a_broken_file_is_never_edited() -> None:
    for text in (b"[project", b"project = 3\n", b"[project]\ndependencies = 'apple'\n"):
        with pytest.raises(Broken):
            edit_pyproject(text, add=["apple"])
    with pytest.raises(Broken):
        edit_package_json(b"{", add={"a": "*"})


@pytest.mark.parametrize(
    ("file", "text"), [(PYPROJECT, b""), (PACKAGE_JSON, b"{}"), (PACKAGE_LOCK, b"{}"), (PYPROJECT, None)]
)
def test_a_file_that_says_nothing_is_not_broken(file: str, text: bytes | None) -> None:
    assert fault(file, text) is None


def test_a_restored_file_has_what_the_snapshot_had_and_what_was_installed_since() -> None:
    anew = restored(PYPROJECT, WRITTEN, ["apple>=2", "pear"])
    assert anew is not None
    assert read_pyproject(anew) == ("apple>=2", "pear")
    anew = restored(PACKAGE_JSON, None, ["@s/a@^1", "b"])
    assert anew is not None
    assert read_package_json(anew) == {"@s/a": "^1", "b": "*"}
    assert restored(PACKAGE_LOCK, b"{}", ["b"]) == b"{}"


def test_lists_of_packages_keep_their_order() -> None:
    assert joined(("b", "a>1", "c"), add=["a<1", "d"], drop=["c"], name=python_name) == ("b", "a<1", "d")
    assert joined(("@s/a@1",), add=["@s/a@2"], name=node_name) == ("@s/a@2",)
