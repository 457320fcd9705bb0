"""A token opens its own account, and only for whoever may read its file."""

from __future__ import annotations

from pathlib import Path
from stat import S_IMODE

import pytest

from skep.errors import Denied, InvalidRequest
from skep.gateway.tokens import Tokens


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "keys")


def test_a_token_is_made_once_in_a_file_for_its_owner_alone(tokens: Tokens) -> None:
    first = tokens.of("default")
    assert tokens.of("default") == first
    assert S_IMODE(tokens.file("default").stat().st_mode) == 0o600
    assert S_IMODE(tokens.file("default").parent.stat().st_mode) == 0o700


def test_a_token_opens_the_account_that_it_names_and_no_other(tokens: Tokens) -> None:
    own, other = tokens.of("default"), tokens.of("acme")
    assert (tokens.account_of(own), tokens.account_of(other)) == ("default", "acme")
    assert tokens.account_of(own.replace("skep_default_", "skep_acme_")) is None


@pytest.mark.parametrize(
    "text", ["", "skep_default_", "skep_../keys/x_" + "a" * 43, "x" * 10_000, "skep_nobody_" + "a" * 43]
)
def test_what_is_no_token_opens_nothing(tokens: Tokens, text: str) -> None:
    tokens.of("default")
    assert tokens.account_of(text) is None


def test_the_local_token_is_for_its_owner_alone_and_is_no_accounts(tokens: Tokens) -> None:
    local = tokens.local()
    assert tokens.is_local(local) and tokens.local() == local
    assert (tokens.account_of(local), tokens.is_local(tokens.of("default"))) == (None, False)
    (file,) = tokens.file("default").parent.glob("local.token")
    assert S_IMODE(file.stat().st_mode) == 0o600


def test_a_renewed_token_makes_the_old_one_void(tokens: Tokens) -> None:
    old = tokens.of("default")
    new = tokens.renew("default")
    assert (tokens.account_of(old), tokens.account_of(new)) == (None, "default")


def test_a_token_that_others_can_read_is_not_used(tokens: Tokens) -> None:
    token = tokens.of("default")
    tokens.file("default").chmod(0o644)
    with pytest.raises(Denied, match="others can read"):
        tokens.account_of(token)


def test_a_file_that_holds_no_token_is_reported(tokens: Tokens) -> None:
    tokens.of("default")
    tokens.file("default").write_text("\n")
    with pytest.raises(Denied, match="holds no token"):
        tokens.of("default")


def test_an_account_cannot_name_a_file_elsewhere(tokens: Tokens) -> None:
    with pytest.raises(InvalidRequest):
        tokens.of("../../etc/passwd")
