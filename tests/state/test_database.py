from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from skep.state.database import Database


async def test_a_fresh_database_has_the_current_schema(database: Database) -> None:
    async with database.read() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM skep_events"))).scalar() == 0


async def test_events_cannot_be_changed(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(
            text("INSERT INTO skep_events VALUES ('h', 1, 'a', NULL, 't', 'now', 'me', '{}', :hash)"),
            {"hash": bytes(32)},
        )
    for change in ("UPDATE skep_events SET actor = 'you'", "DELETE FROM skep_events"):
        with pytest.raises(IntegrityError, match="append-only"):
            async with database.write() as connection:
                await connection.execute(text(change))
