"""A secret is known by its name or its shape, and what is none is left alone."""

from __future__ import annotations

import pytest

from skep.config.secrets import (
    MASK,
    is_secret_name,
    key_variable,
    known_secrets,
    mask_text,
    mask_url,
)

SECRETS = [
    "sk-proj-0123456789abcdefABCDEF",
    "sk-ant-api03-0123456789abcdef",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "github_pat_11ABCDEFG0123456789_abcdefghijklmnop",
    "glpat-0123456789abcdefghij",
    "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA0123456789abcdefghijklmnopqrstuv",
    "xoxb-0123456789-abcdefghij",
    "hf_0123456789abcdefghijABCD",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\nabc\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEI",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_blotted_out_wherever_it_stands(secret: str) -> None:
    for text in (secret, f"before {secret} after", f'{{"k":"{secret}"}}', f"(x={secret})"):
        masked = mask_text(text)
        assert MASK in masked
        assert secret[:20] not in masked
        assert secret[-12:] not in masked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Bearer abc.def-ghi_123", f"Authorization: Bearer {MASK}"),
        ("postgresql://u:p@ss:w0rd@host:5432/db", f"postgresql://u:{MASK}@host:5432/db"),
        ("redis://:hunter22@host", f"redis://:{MASK}@host"),
        ("password=hunter22 next", f"password={MASK} next"),
        ('{"db_password": "hunter22"}', f'{{"db_password": "{MASK}"}}'),
        ("OPENAI_API_KEY=abcdefgh", f"OPENAI_API_KEY={MASK}"),
    ],
)
def test_what_surrounds_a_secret_stays_readable(text: str, expected: str) -> None:
    assert mask_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a risk-free task-list for the desk-top",
        "https://host:8080/path?x=1@2",
        "git@github.com:owner/name.git",
        "the token count is 12 and the key is under the mat",
        "sk-short",
        "12:30:45 ERROR user@example.org",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert mask_text(text) == text


def test_known_values_are_blotted_out_whatever_their_shape() -> None:
    known = known_secrets({"MY_TOKEN": "correct horse", "PATH": "/usr/bin", "X_API_KEY": "correct horse battery"})
    assert known == ("correct horse battery", "correct horse")
    assert mask_text("say correct horse battery", known) == f"say {MASK}"


def test_a_short_value_of_a_secret_variable_is_not_hunted_for() -> None:
    assert known_secrets({"X_TOKEN": "true"}) == ()


@pytest.mark.parametrize("name", ["api_key", "APIKey", "db-password", "AWS_SECRET_ACCESS_KEY", "cookie", "auth"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["max_tokens", "input_tokens", "key_id", "public_key", "monkey", "keyboard"])
def test_names_of_harmless_fields(name: str) -> None:
    assert not is_secret_name(name)


def test_a_url_shows_neither_its_password_nor_a_secret_in_its_query() -> None:
    url = "postgresql://u:pw@h/d?sslmode=require&password=hunter22&sslpassword=other"
    assert mask_url(url) == f"postgresql://u:{MASK}@h/d?sslmode=require&password={MASK}&sslpassword={MASK}"


@pytest.mark.parametrize(
    ("provider", "variable"),
    [
        ("anthropic", "ANTHROPIC_API_KEY"),
        ("openai", "OPENAI_API_KEY"),
        ("google", "GEMINI_API_KEY"),
        ("my-own_host", "MY_OWN_HOST_API_KEY"),
    ],
)
def test_each_provider_has_a_variable(provider: str, variable: str) -> None:
    assert key_variable(provider) == variable
