from __future__ import annotations

from pathlib import Path

import pytest

from skep.errors import ConfigInvalid
from skep.state.location import Location


def test_a_sqlite_url_is_taken_as_a_path_word_for_word() -> None:
    location = Location.parse("sqlite:////var/lib/a ?b#c%20d/skep.db")
    assert (location.dialect, location.path) == ("sqlite", Path("/var/lib/a ?b#c%20d/skep.db"))
    assert location.url.database == str(location.path) == str(location)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_the_usual_spellings_of_postgresql_are_understood(scheme: str) -> None:
    location = Location.parse(f"{scheme}://bee:secret@host:5433/hive?sslmode=require")
    assert (location.dialect, location.path, location.url.port) == ("postgresql", None, 5433)
    assert location.url.query == {"sslmode": "require"}


def test_a_password_is_never_shown() -> None:
    location = Location.parse("postgresql://bee:secret@host/hive")
    assert "secret" not in f"{location} {location!r}"
    assert "bee" in str(location)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "skep.db",
        "mysql://host/db",
        "sqlite://",
        "sqlite:///relative.db",
        "sqlite:///:memory:",
        "sqlite:////a\0b",
        "postgresql://host:notaport/db",
        "x" * 10_000,
    ],
)
def test_other_urls_are_refused_with_a_hint_and_without_an_echo(url: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        Location.parse(url)
    assert caught.value.hint
    assert len(caught.value.message) < 200 and caught.value.message.isprintable()


def test_a_password_in_a_refused_url_is_not_shown() -> None:
    with pytest.raises(ConfigInvalid) as caught:
        Location.parse("postgresql://bee:secret@host:port/hive")
    assert "secret" not in f"{caught.value.message} {caught.value.hint}"
