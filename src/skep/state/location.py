"""Where a database is: a checked `state_url`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from skep.errors import ConfigInvalid

Dialect = Literal["sqlite", "postgresql"]

SQLITE_PREFIX = "sqlite:///"


@dataclass(frozen=True, slots=True)
class Location:
    """A database that may be opened; `str()` of it never shows a password."""

    dialect: Dialect
    url: URL
    path: Path | None

    def __str__(self) -> str:
        return str(self.path) if self.path else self.url.set(drivername="postgresql").render_as_string()

    @classmethod
    def parse(cls, url: str) -> Location:
        """Check a state_url, or raise ConfigInvalid naming the two forms that are understood."""
        if url.startswith(SQLITE_PREFIX):
            return cls._sqlite(url.removeprefix(SQLITE_PREFIX))
        if url.partition("://")[0] in ("postgresql", "postgres", "postgresql+psycopg"):
            return cls._postgresql(url)
        raise ConfigInvalid(
            f"state_url starts with {url.partition(':')[0][:60]!r}, which is not a database Skep knows",
            hint="use sqlite:////absolute/path.db or postgresql://user@host/database",
        )

    @classmethod
    def _sqlite(cls, name: str) -> Location:
        # The rest of the URL is the path, verbatim: a folder may well contain '?', '#' or '%'.
        path = Path(name)
        if "\0" in name or not path.is_absolute():
            raise ConfigInvalid(
                f"state_url does not name an absolute path: {name[:60]!r}",
                hint="an absolute path makes four slashes, as in sqlite:////home/me/skep.db",
            )
        return cls("sqlite", URL.create("sqlite+aiosqlite", database=name), path)

    @classmethod
    def _postgresql(cls, url: str) -> Location:
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError) as error:
            raise ConfigInvalid(
                "state_url is not a PostgreSQL address",
                hint="use postgresql://user@host:5432/database, with odd characters of the password as %XX",
            ) from error
        return cls("postgresql", parsed.set(drivername="postgresql+psycopg"), None)
