"""Templates are plain YAML: what is not is told with its place, in words, and costs nothing to refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from skep.workspace.template.source import LARGEST_BYTES, read


def told(text: str | bytes) -> list[str]:
    return [str(problem) for problem in read(text if isinstance(text, bytes) else text.encode()).problems]


def test_values_come_with_their_places() -> None:
    source = read(b"a: 1\nb:\n  - x\n  - {c: 2.5}\n")
    assert source.whole
    assert source.data == {"a": 1, "b": ["x", {"c": 2.5}]}
    assert str(source.problem(("b", 1, "c"), "here")) == "4:6: b[1].c: here"
    assert str(source.problem(("b", 1, "absent"), "near")) == "4:5: b[1].absent: near"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("on", "on"),
        ("no", "no"),
        ("010", 10),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("0x10", "0x10"),
        ("true", True),
        ("null", None),
        ("nUll", "nUll"),
        ("'3.10'", "3.10"),
        ("-2.5e3", -2500.0),
        ("=", "="),
        ("9" * 30, "9" * 30),
    ],
)
def test_words_are_words_as_in_yaml_1_2(text: str, value: object) -> None:
    assert read(f"a: {text}\n".encode()).data == {"a": value}


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("a:\n\t- b\n\t- c\n", ["2:1: is indented with a tab", "3:1: is indented with a tab"]),
        ("d:\n  - *.example.org\n", ['2:5: a value cannot begin with * in YAML; put it in quotes: "*.example.org"']),
        ("d:\n  - @scope/name\n", ['2:5: a value cannot begin with @ in YAML; put it in quotes: "@scope/name"']),
        ("v: >=3.11\n", ['1:4: a value cannot begin with > in YAML; put it in quotes: ">=3.11"']),
        ("v: [a, @b]\n", ["1:8: a value cannot begin with this character in YAML; put it in quotes"]),
        ("a: b: c\n", ["1:5: there is a colon where none can be"]),
        ("a: 1\nb\n", ["2:1: this line has no colon after its name"]),
        ("a:\n  b: 1\n c: 2\n", ["3:2: this line does not fit the ones above it"]),
        ("a: 'open\n", ["1:4: a quotation mark is opened here and never closed"]),
        ("a: [1, 2\nb: 3\n", ["1:4: a bracket is opened here and not closed"]),
        ('a: "\\d"\n', ["1:6: a backslash means something in double quotes; use single quotes"]),
        ("a: 1\n---\nb: 2\n", ["2:1: holds a second document"]),
        ("? [a]\n: b\n", ['1:3: "?": is a name that is not a word']),
        ("a: \x07\n", ["1:4: holds the character U+0007"]),
        ("a: 1\nb: \x00\n", ["2:4: holds the character U+0000"]),
    ],
)
def test_what_is_not_yaml_is_explained_where_it_stands(text: str, problems: list[str]) -> None:
    found = told(text)
    assert len(found) == len(problems)
    assert all(one.startswith(expected) for one, expected in zip(found, problems, strict=True)), found


def test_tabs_in_a_text_are_no_mistake() -> None:
    assert read(b"a: |\n  x\n  \ty\n").data == {"a": "x\n\ty\n"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: 1\nb: \xff\n", "2:4: byte 8 is not UTF-8 text; save it as UTF-8"),
        ("\xe9: 1\n".encode("latin-1"), "1:1: byte 0 is not UTF-8 text"),
        ("a: 1".encode("utf-16"), "1:1: byte 0 is not UTF-8 text"),
        (b"#" * (LARGEST_BYTES + 1), "1:1: is larger than 64 kB"),
    ],
)
def test_bytes_that_are_no_template_are_refused(content: bytes, problem: str) -> None:
    (found,) = told(content)
    assert found.startswith(problem)


def test_a_byte_order_mark_and_other_line_ends_are_let_through() -> None:
    source = read("\ufeffa: 1\r\nb: é\r\n".encode())
    assert source.data == {"a": 1, "b": "é"}
    assert str(source.problem(("b",), "here")) == "2:1: b: here"


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def size(value: object) -> int:
    """Count the values, those that are shared once for each place in which they stand."""
    known: dict[int, int] = {}

    def count(one: object) -> int:
        if not isinstance(one, list):
            return 1
        if id(one) not in known:
            known[id(one)] = sum(map(count, one))
        return known[id(one)]

    return count(value)


def test_a_bomb_of_aliases_is_refused_at_each_alias_and_never_unfolded() -> None:
    assert size(yaml.safe_load(BOMB)["i"]) == 9**9  # what other readers make of 600 bytes
    found = told(BOMB)
    assert all("alias" in one or "anchor" in one for one in found)
    assert "2:8: b[0]: uses the alias *a" in found[2]
    assert size(read(BOMB.encode()).data["i"]) == 9


def test_an_alias_cannot_hold_itself() -> None:
    found = told("a: &a [*a]\n")
    assert [one.split(";")[0] for one in found] == ["1:4: a: has the anchor &a", "1:8: a[0]: uses the alias *a"]


def test_a_tag_makes_nothing_of_pythons(tmp_path: Path) -> None:
    made = tmp_path / "made"
    text = f"a: !!python/object/apply:os.mkdir ['{made}']\n"
    yaml.unsafe_load(text)  # the control: a reader that obeys it
    assert made.is_dir()
    made.rmdir()
    assert told(text)[0].startswith("1:4: a: has the tag !!python/object/apply:os.mkdir; take it away")
    assert not made.exists()


@pytest.mark.parametrize(
    "text", ["[" * 60_000, "{a: " * 15_000, "- " * 30_000, "a:\n" + "".join(f"{' ' * n}b:\n" for n in range(1, 300))]
)
def test_depth_has_an_end(text: str) -> None:
    (found,) = told(text)
    assert "is nested too deeply" in found
