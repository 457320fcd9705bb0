"""Alembic's entry: run the scripts on the connection, and in the transaction, of the caller."""

from __future__ import annotations

from alembic import context

from skep.state.revision import VERSION_TABLE
from skep.state.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
context.run_migrations()
