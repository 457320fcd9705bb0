"""Which program and which schema a database holds, and the way from an older schema to this one.

Alembic is imported only when there is something to migrate: a database at HEAD is recognised by two queries.
"""

from __future__ import annotations

import struct
from pathlib import Path

from sqlalchemy import Connection, text

from skep.errors import DatabaseTooNew, ForeignDatabase

# Oldest first; a test holds them equal to Alembic's own list.
REVISIONS = ("0001", "0002", "0003")
HEAD = REVISIONS[-1]

VERSION_TABLE = "skep_alembic_version"
SCHEMA = "skep"
APPLICATION_ID = 0x534B4550  # "SKEP" in ASCII, at offset 68 of the file
MARK = "Skep state"

_ELSEWHERE = "point state_url at another place; nothing was changed"
# Any fixed number will do; it only has to be the same in every Skep.
_MIGRATION_LOCK = APPLICATION_ID


def check_file(path: Path) -> bool:
    """Say whether a SQLite file of Skep's exists, reading its header alone.

    Opening a foreign file with SQLite could already write beside it, so that is not done. The mark is in the
    file itself as soon as it has a header, since it is set before the journal becomes a write-ahead log.
    """
    header = _header(path)
    if not header:
        return False
    if not header.startswith(b"SQLite format 3\0") or len(header) < 100:
        raise ForeignDatabase(f"{path} is not a SQLite database", hint=_ELSEWHERE)
    (mark,) = struct.unpack_from(">I", header, 68)
    if mark != APPLICATION_ID:
        raise ForeignDatabase(f"{path} belongs to another program", hint=_ELSEWHERE)
    return True


def _header(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(100)
    except FileNotFoundError:
        return b""


def stored(connection: Connection, place: object) -> str | None:
    """Read the schema revision, None in an empty database; refuse a foreign or a newer one."""
    if connection.dialect.name == "postgresql":
        _check_mark(connection, place)
        known = connection.execute(text("SELECT to_regclass(:name) IS NOT NULL"), {"name": f"{SCHEMA}.{VERSION_TABLE}"})
    else:
        known = connection.execute(
            text("SELECT count(*) FROM sqlite_master WHERE name = :name"), {"name": VERSION_TABLE}
        )
    if not known.scalar():
        return None
    revision: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608
    if revision is not None and revision not in REVISIONS:
        raise DatabaseTooNew(
            f"{place} has schema {revision[:60]!r}, this Skep knows schemas up to {HEAD!r}",
            hint="install a newer Skep; nothing was changed",
        )
    return revision


def _check_mark(connection: Connection, place: object) -> None:
    rows = connection.execute(
        text(
            "SELECT c.relname, obj_description(c.oid, 'pg_class') FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = :schema"
        ),
        {"schema": SCHEMA},
    ).all()
    # An empty schema may have been made ready by an administrator.
    if rows and (VERSION_TABLE, MARK) not in [tuple(row) for row in rows]:
        raise ForeignDatabase(f"the schema {SCHEMA} of {place} belongs to another program", hint=_ELSEWHERE)


def upgrade(connection: Connection, place: object, *, to: str = HEAD) -> str | None:
    """Bring the schema to a revision inside the caller's transaction; return the one it had before."""
    shared = connection.dialect.name == "postgresql"
    if shared:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
    before = stored(connection, place)
    if before == to:
        return before
    # Not "IF NOT EXISTS": that asks for the right to create schemas even where there is nothing to create.
    if shared and not connection.execute(text(f"SELECT to_regnamespace('{SCHEMA}')")).scalar():
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
    _run_alembic(connection, to)
    if shared:
        connection.execute(text(f"COMMENT ON TABLE {VERSION_TABLE} IS '{MARK}'"))
    return before


def _run_alembic(connection: Connection, to: str) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, to)
