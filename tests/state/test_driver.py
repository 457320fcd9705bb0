"""SQLite through few trips to its thread gives what it gives through many."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skep.state.driver import FIRST_ROWS, Connection, connect

MANY = 3 * FIRST_ROWS + 7
COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) SELECT i FROM n"


async def opened(folder: Path) -> Connection:
    connection = connect(str(folder / "a.db"), isolation_level=None, timeout=0)
    await connection
    return connection


@pytest.fixture
async def connection(tmp_path: Path) -> AsyncIterator[Connection]:
    connection = await opened(tmp_path)
    await connection.cursor().execute("PRAGMA journal_mode = WAL")
    await connection.cursor().execute("CREATE TABLE bees (name TEXT PRIMARY KEY)")
    yield connection
    await connection.close()


@pytest.mark.parametrize("rows", [0, 1, FIRST_ROWS - 1, FIRST_ROWS, FIRST_ROWS + 1, MANY])
async def test_a_result_of_any_length_comes_whole_at_once_or_in_parts(connection: Connection, rows: int) -> None:
    wanted = [(n,) for n in range(1, rows + 1)]
    statement = f"{COUNT} WHERE i <= {rows}"
    cursor = await connection.cursor().execute(statement, (max(rows, 1),))
    assert await cursor.fetchall() == wanted
    await cursor.close()
    cursor, parts = await connection.cursor().execute(statement, (max(rows, 1),)), []
    while part := await cursor.fetchmany(700):
        parts += part
    assert parts == wanted
    assert await cursor.fetchone() is None
    await cursor.close()


async def test_a_result_that_is_left_half_read_holds_nothing(connection: Connection) -> None:
    connection.begin(writes=True)
    cursor = await connection.cursor().execute(COUNT, (MANY,))
    assert await cursor.fetchone() == (1,)
    await cursor.close()
    await connection.rollback()
    connection.begin(writes=True)
    await connection.cursor().execute("INSERT INTO bees VALUES ('anna')")
    await connection.commit()


async def test_a_transaction_begins_with_its_first_statement_and_not_before(
    connection: Connection, tmp_path: Path
) -> None:
    other = await opened(tmp_path)
    connection.begin(writes=True)
    other.begin(writes=True)
    await other.cursor().execute("INSERT INTO bees VALUES ('anna')")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        await connection.cursor().execute("INSERT INTO bees VALUES ('berta')")
    await connection.rollback()
    await other.commit()
    connection.begin(writes=True)
    await connection.cursor().execute("INSERT INTO bees VALUES ('berta')")
    await connection.commit()
    assert await (await other.cursor().execute("SELECT name FROM bees")).fetchall() == [("anna",), ("berta",)]
    await other.close()


async def test_a_read_sees_one_moment_until_it_ends(connection: Connection, tmp_path: Path) -> None:
    reader = await opened(tmp_path)

    async def seen() -> list[tuple[str, ...]]:
        return await (await reader.cursor().execute("SELECT name FROM bees")).fetchall()

    reader.begin(writes=False)
    assert await seen() == []
    await connection.cursor().execute("INSERT INTO bees VALUES ('anna')")
    assert await seen() == []
    await reader.commit()
    reader.begin(writes=False)
    assert await seen() == [("anna",)]
    await reader.commit()
    await reader.close()


async def test_a_statement_that_fails_leaves_the_rest_of_its_transaction_to_be_undone(connection: Connection) -> None:
    connection.begin(writes=True)
    await connection.cursor().execute("INSERT INTO bees VALUES ('anna')")
    with pytest.raises(sqlite3.IntegrityError):
        await connection.cursor().executemany("INSERT INTO bees VALUES (?)", [("berta",), ("anna",)])
    await connection.rollback()
    cursor = await connection.cursor().execute("SELECT count(*) FROM bees")
    assert await cursor.fetchone() == (0,)
