"""No secret and no body of a memory or a skill gets past the masking, at any depth and in any form."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skep.app.masking import Masking
from skep.config.secrets import MASK

KNOWN = "known-by-its-value"
SHAPED = "sk-ant-REDACTED"


def masked(**fields: Any) -> dict[str, Any]:
    return dict(Masking((KNOWN,))(None, "info", fields))


@dataclasses.dataclass
class Thing:
    inner: object


class Stubborn:
    def __repr__(self) -> str:
        return f"<Stubborn {SHAPED}>"


@pytest.mark.parametrize("secret", [KNOWN, SHAPED, "Bearer abcdefgh12345678", "ghp_0123456789abcdefghijABCDEFGHIJ"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: text,
        lambda text: f"in the middle of {text} a sentence",
        lambda text: [text],
        lambda text: (1, (text,)),
        lambda text: {text},
        lambda text: {"a": [{"b": {"c": text}}]},
        lambda text: {text: "as a name"},
        lambda text: text.encode(),
        lambda text: Thing(Thing(text)),
        ValueError,
        lambda text: Path("/tmp") / text,
    ],
)
def test_a_secret_is_masked_in_whatever_it_is_wrapped(secret: str, wrap: Any) -> None:
    assert secret not in repr(masked(value=wrap(secret)))


def test_an_object_that_shows_a_secret_is_masked() -> None:
    assert masked(thing=Stubborn()) == {"thing": f"<Stubborn {MASK}>"}


@pytest.mark.parametrize("name", ["api_key", "Authorization", "db_password", "clientSecret", "refresh_token"])
def test_a_field_with_the_name_of_a_secret_is_masked_whatever_it_holds(name: str) -> None:
    for value in ("x", 12345, ["x"], b"x"):
        assert masked(outer={name: value}) == {"outer": {name: MASK}}


def test_measures_and_absent_values_stay() -> None:
    fields = {"max_tokens": 5, "input_tokens": 7, "api_key": None, "has_token": True, "count": 3, "ratio": 0.5}
    assert masked(**fields) == fields


@pytest.mark.parametrize("name", ["memory_md", "MEMORY.md", "memory", "skill_body", "skill_md", "projection"])
def test_the_body_of_a_memory_or_a_skill_is_withheld(name: str) -> None:
    assert masked(**{name: "private words"}) == {name: "[withheld, 13 characters]"}
    assert "private" not in repr(masked(deep=[{name: {"lines": ["private words"]}}]))


@pytest.mark.parametrize(
    "path", ["/w/hive/MEMORY.md", "MEMORY.md", "hive/memory/2026-01-31.md", "hive/skills/x/SKILL.md"]
)
@pytest.mark.parametrize("name", ["content", "text", "body", "data", "diff"])
def test_a_record_about_such_a_file_shows_its_path_and_not_its_content(path: str, name: str) -> None:
    assert masked(file={"path": path, name: "private"}) == {"file": {"path": path, name: "[withheld, 7 characters]"}}


def test_the_text_of_a_skill_is_known_by_its_front_matter() -> None:
    text = "---\nname: brew-tea\ndescription: Brew tea.\n---\nprivate words"
    assert masked(output=text) == {"output": f"[withheld, {len(text)} characters]"}


def test_content_of_other_files_stays() -> None:
    assert masked(path="README.md", content="public") == {"path": "README.md", "content": "public"}


def test_a_structure_that_holds_itself_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "[too deep]" in repr(masked(loop=loop))


def test_a_very_long_text_is_cut_and_no_secret_survives_at_the_cut() -> None:
    for shift in range(40):
        text = "x " * (8192 - shift) + SHAPED * 3 + " y" * 100_000
        shown = masked(text=text)["text"]
        assert len(shown) < 20_000
        assert "sk-ant" not in shown


@given(
    st.recursive(
        st.just(SHAPED) | st.just(KNOWN) | st.text(max_size=5) | st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=12,
    )
)
def test_no_structure_lets_a_secret_through(value: Any) -> None:
    shown = repr(masked(value=value))
    assert KNOWN not in shown
    assert SHAPED not in shown
