"""Bind keys to workspaces: sessions, and how a hive's computers are kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("skep_hives", sa.Column("upkeep", _TEXT, nullable=False, server_default=sa.text("'{}'")))
    op.create_table(
        "skep_sessions",
        sa.Column("id", _TEXT, nullable=False),
        sa.Column("account_id", _TEXT, nullable=False),
        sa.Column("hive_id", _TEXT, nullable=False),
        sa.Column("key", _TEXT, nullable=False),
        sa.Column("status", _TEXT, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("host", _TEXT),
        sa.Column("controller", _TEXT),
        sa.Column("archive", _TEXT),
        sa.Column("rooms", _TEXT, nullable=False, server_default=sa.text("'{}'")),
        sa.Column("resume_fail_count", sa.Integer, nullable=False),
        sa.Column("last_error", _TEXT),
        sa.Column("created_at", _TEXT, nullable=False),
        sa.Column("changed_at", _TEXT, nullable=False),
        sa.Column("active_at", _TEXT, nullable=False),
        sa.Column("healthy_at", _TEXT),
        sa.Column("unarchived_at", _TEXT),
        sa.Column("warned_at", _TEXT),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_skep_sessions")),
        sa.ForeignKeyConstraint(["account_id"], ["skep_accounts.id"], name=op.f("fk_skep_sessions_account_id")),
        sa.ForeignKeyConstraint(["hive_id"], ["skep_hives.id"], name=op.f("fk_skep_sessions_hive_id")),
    )
    op.create_table(
        "skep_outages",
        sa.Column("hive_id", _TEXT, nullable=False),
        sa.Column("since", _TEXT, nullable=False),
        sa.Column("flipped_at", _TEXT),
        sa.Column("last_error", _TEXT, nullable=False),
        sa.PrimaryKeyConstraint("hive_id", name=op.f("pk_skep_outages")),
        sa.ForeignKeyConstraint(["hive_id"], ["skep_hives.id"], name=op.f("fk_skep_outages_hive_id")),
    )
    op.create_index("ix_skep_sessions_hive", "skep_sessions", ["hive_id", "key"])
    op.create_index("ix_skep_sessions_status", "skep_sessions", ["status", "active_at"])
