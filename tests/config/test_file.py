"""config.json is read whole or refused with the exact place of each mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skep.config import Paths, Settings, load
from skep.config.file import LARGEST_BYTES, judge
from skep.config.problem import Problem
from skep.errors import ConfigInvalid


def paths_for(config: Path, *, named: bool = True) -> Paths:
    return Paths(config=config, home=config.parent, logs=config.parent, config_named=named)


def problems_of(text: str) -> list[Problem]:
    judged = judge(text.encode())
    assert isinstance(judged, list), f"expected problems, got {judged}"
    return judged


def only_problem(text: str) -> Problem:
    (problem,) = problems_of(text)
    return problem


def test_an_absent_file_at_the_usual_place_means_the_defaults(tmp_path: Path) -> None:
    assert load(paths_for(tmp_path / "config.json", named=False)) == Settings()


def test_an_absent_file_that_skep_config_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="no such file"):
        load(paths_for(tmp_path / "config.json"))


def test_an_empty_object_is_a_valid_file() -> None:
    assert judge(b"{}") == Settings()


def test_the_schema_key_is_allowed_for_editors() -> None:
    assert isinstance(judge(b'{"$schema": "./config.schema.json"}'), Settings)


def test_a_byte_order_mark_does_no_harm() -> None:
    assert isinstance(judge(b"\xef\xbb\xbf{}"), Settings)


def test_the_default_limits_are_those_that_are_promised() -> None:
    limits = Settings().sandbox.limits
    assert (limits.cpus, limits.memory_mb, limits.disk_mb) == (2.0, 4096, 5120)
    assert (limits.command_timeout_s, limits.command_timeout_cap_s) == (30, 300)


def test_an_unknown_field_is_named_with_line_column_and_the_likely_meaning() -> None:
    problem = only_problem('{\n  "sandbox": {\n    "limits": {"memori_mb": 1}\n  }\n}')
    assert problem.field == "sandbox.limits.memori_mb"
    assert problem.position is not None
    assert (problem.position.line, problem.position.column) == (3, 16)
    assert problem.hint == "did you mean memory_mb?"


def test_an_unknown_field_unlike_any_other_lists_those_that_exist() -> None:
    problem = only_problem('{"policy": {"colour": "red"}}')
    assert problem.hint == "known here: allowed_hosts, upstreams, may_reach_out, approval_timeout_s"


def test_every_mistake_is_told_at_once_in_the_order_of_the_file() -> None:
    found = problems_of('{"budgets": {"usd_per_day": -1},\n "chat_models": [{"id": "m"}],\n "x": 1}')
    assert [problem.field for problem in found] == ["budgets.usd_per_day", "chat_models[0].provider", "x"]


def test_a_wrong_value_is_quoted_with_what_would_be_right() -> None:
    problem = only_problem('{"chat_models": [{"id": "m", "provider": "p", "intelligence_level": "smart"}]}')
    assert str(problem) == (
        "chat_models[0].intelligence_level (line 1, column 47): should be 'light', 'normal' or 'super', got \"smart\""
    )


@pytest.mark.parametrize(
    ("text", "words", "line", "column"),
    [
        ("", "it is empty", 1, 1),
        ("{", "it ends too early", 1, 2),
        ('{\n  "budgets": {},\n}', "there is a comma too many", 3, 1),
        ('{\n  "budgets": {]\n}', "expecting property name", 2, 15),
        ('{"budgets": {"usd_per_day": NaN}}', "NaN is no JSON number", 1, 29),
    ],
)
def test_malformed_json_is_named_with_line_and_column(text: str, words: str, line: int, column: int) -> None:
    problem = only_problem(text)
    assert words in problem.message
    assert problem.position is not None
    assert (problem.position.line, problem.position.column) == (line, column)


@pytest.mark.parametrize("text", ["[]", "3", '"text"', "null"])
def test_anything_but_an_object_is_refused(text: str) -> None:
    assert "one JSON object" in only_problem(text).message


@pytest.mark.parametrize("text", ["[" * 100_000, '{"sandbox":' * 500 + "1" + "}" * 500])
def test_deep_nesting_is_refused_rather_than_crashing(text: str) -> None:
    assert only_problem(text).message == "is nested too deeply"


def test_a_number_of_absurd_length_is_refused_rather_than_crashing() -> None:
    assert "digits" in only_problem('{"budgets": {"usd_per_day": ' + "1" * 10_000 + "}}").message


def test_a_field_given_twice_is_refused() -> None:
    problem = only_problem('{"budgets": {},\n "budgets": {}}')
    assert (problem.field, problem.message) == ("budgets", "is given twice")


def test_strings_are_not_taken_for_numbers_nor_true_for_one() -> None:
    found = problems_of('{"budgets": {"steps_per_task": "5", "usd_per_day": true}}')
    assert [problem.field for problem in found] == ["budgets.steps_per_task", "budgets.usd_per_day"]


def test_a_default_timeout_above_the_cap_is_refused() -> None:
    problem = only_problem('{"sandbox": {"limits": {"command_timeout_s": 301}}}')
    assert problem.field == "sandbox.limits.command_timeout_cap_s"


def test_a_model_given_twice_is_refused() -> None:
    model = '{"id": "m", "provider": "openai"}'
    assert only_problem(f'{{"chat_models": [{model}, {model}]}}').message == "holds m of openai twice"


def test_a_name_that_plays_tricks_on_the_terminal_is_shown_escaped_and_short() -> None:
    problem = only_problem('{"\\u202e\\u001b[31m' + "a" * 10_000 + '": 1}')
    assert "\u202e" not in problem.field
    assert "\x1b" not in problem.field
    assert len(problem.field) < 80


def test_bytes_that_are_not_utf8_are_refused_with_their_place() -> None:
    judged = judge(b'{"a": "\xff"}')
    assert isinstance(judged, list)
    assert "byte 7" in judged[0].message


@pytest.mark.parametrize(
    "field", ["api_key", "apiKey", "API-KEY", "openai_api_key", "secret", "password", "token", "auth_token"]
)
def test_a_field_that_looks_like_a_key_is_refused_with_the_variable_to_use(field: str) -> None:
    problem = only_problem(f'{{"chat_models": [{{"id": "m", "provider": "mistral", "{field}": "0123456789"}}]}}')
    assert problem.field == f"chat_models[0].{field}"
    assert "environment only" in problem.message
    assert "export MISTRAL_API_KEY=" in (problem.hint or "")
    assert "0123456789" not in str(problem)


def test_a_key_in_a_field_of_another_name_is_refused_and_not_repeated() -> None:
    problem = only_problem('{"chat_models": [{"id": "sk-ant-REDACTED", "provider": "anthropic"}]}')
    assert problem.field == "chat_models[0].id"
    assert "export ANTHROPIC_API_KEY=" in (problem.hint or "")
    assert "sk-ant" not in str(problem)


@pytest.mark.parametrize("url", ["mysql://u:hunter2hunter2@h/d", "sqlite:///relative.db", "hunter2hunter2"])
def test_a_wrong_state_url_is_refused_without_being_shown(url: str) -> None:
    problem = only_problem(f'{{"state_url": "{url}"}}')
    assert problem.field == "state_url"
    assert "hunter2" not in str(problem)


@pytest.mark.parametrize("url", ["ftp://x", "https://user:pw@host", "nonsense", "http://"])
def test_a_wrong_base_url_is_refused(url: str) -> None:
    text = f'{{"chat_models": [{{"id": "m", "provider": "p", "base_url": "{url}"}}]}}'
    assert only_problem(text).field == "chat_models[0].base_url"


@pytest.mark.parametrize("host", ["*", "evil.com/", "a b.com", "*.com.", "10.0.0.1", "host:0", "host:53"])
def test_an_allowed_host_is_a_name_and_nothing_else(host: str) -> None:
    assert only_problem(f'{{"policy": {{"allowed_hosts": ["{host}"]}}}}').field == "policy.allowed_hosts[0]"


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigInvalid, match="is not a regular file"):
        load(paths_for(tmp_path / "config.json"))


def test_a_named_pipe_does_not_make_skep_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigInvalid, match="not a regular file"):
        load(paths_for(tmp_path / "config.json"))


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * (LARGEST_BYTES + 1))
    with pytest.raises(ConfigInvalid, match="larger than 1 MB"):
        load(paths_for(tmp_path / "config.json"))


@given(st.binary(max_size=200))
def test_no_bytes_whatever_make_the_reader_fail(content: bytes) -> None:
    judged = judge(content)
    assert isinstance(judged, Settings) or (judged and all(problem.message for problem in judged))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(Settings.model_fields)), _JSON, min_size=1))
def test_wrong_values_anywhere_are_told_by_field(data: dict[str, object]) -> None:
    import json

    judged = judge(json.dumps(data).encode())
    if isinstance(judged, list):
        assert all(problem.field for problem in judged)
        assert all(problem.position is not None for problem in judged)
