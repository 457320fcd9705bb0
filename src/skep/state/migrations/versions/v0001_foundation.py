"""Lay the foundation: accounts, hives, roll-outs, the event log, its checkpoints and leases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_APPEND_ONLY = ("skep_events", "skep_checkpoints")


def upgrade() -> None:
    _create_households()
    _create_log()
    _create_leases()
    if op.get_bind().dialect.name == "postgresql":
        _forbid_changes_on_postgresql()
    else:
        _forbid_changes_on_sqlite()


def _create_households() -> None:
    op.create_table(
        "skep_accounts",
        sa.Column("id", _TEXT, nullable=False),
        sa.Column("created_at", _TEXT, nullable=False),
        sa.Column("deleted_at", _TEXT),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_skep_accounts")),
    )
    op.create_table(
        "skep_hives",
        sa.Column("id", _TEXT, nullable=False),
        sa.Column("account_id", _TEXT, nullable=False),
        sa.Column("name", _TEXT, nullable=False),
        sa.Column("sandbox_enabled", sa.Boolean, nullable=False),
        sa.Column("file_memory_enabled", sa.Boolean, nullable=False),
        sa.Column("self_healing_enabled", sa.Boolean, nullable=False),
        sa.Column("skill_authoring_enabled", sa.Boolean, nullable=False),
        sa.Column("created_at", _TEXT, nullable=False),
        sa.Column("deleted_at", _TEXT),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_skep_hives")),
        sa.ForeignKeyConstraint(["account_id"], ["skep_accounts.id"], name=op.f("fk_skep_hives_account_id")),
    )
    alive = sa.text("deleted_at IS NULL")
    op.create_index(
        "ix_skep_hives_name",
        "skep_hives",
        ["account_id", "name"],
        unique=True,
        sqlite_where=alive,
        postgresql_where=alive,
    )
    op.create_table(
        "skep_rollouts",
        sa.Column("flag", _TEXT, nullable=False),
        sa.Column("percent", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("flag", name=op.f("pk_skep_rollouts")),
        sa.CheckConstraint("percent >= 0 AND percent <= 100", name=op.f("ck_skep_rollouts_percent")),
    )


def _create_log() -> None:
    op.create_table(
        "skep_events",
        sa.Column("hive_id", _TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("account_id", _TEXT, nullable=False),
        sa.Column("task_id", _TEXT),
        sa.Column("type", _TEXT, nullable=False),
        sa.Column("at", _TEXT, nullable=False),
        sa.Column("actor", _TEXT, nullable=False),
        sa.Column("record", _TEXT, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("hive_id", "seq", name=op.f("pk_skep_events")),
        sa.CheckConstraint("seq >= 1", name=op.f("ck_skep_events_seq")),
        sa.CheckConstraint("length(hash) = 32", name=op.f("ck_skep_events_hash")),
    )
    op.create_index("ix_skep_events_type", "skep_events", ["hive_id", "type", "seq"])
    of_a_task = sa.text("task_id IS NOT NULL")
    op.create_index(
        "ix_skep_events_task",
        "skep_events",
        ["hive_id", "task_id", "seq"],
        sqlite_where=of_a_task,
        postgresql_where=of_a_task,
    )
    op.create_index("ix_skep_events_at", "skep_events", ["hive_id", "at"])
    op.create_table(
        "skep_event_heads",
        sa.Column("hive_id", _TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("checkpoint_seq", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.PrimaryKeyConstraint("hive_id", name=op.f("pk_skep_event_heads")),
    )
    op.create_table(
        "skep_checkpoints",
        sa.Column("hive_id", _TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("at", _TEXT, nullable=False),
        sa.Column("key_id", _TEXT, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("hive_id", "seq", "key_id", name=op.f("pk_skep_checkpoints")),
    )


def _create_leases() -> None:
    op.create_table(
        "skep_leases",
        sa.Column("name", _TEXT, nullable=False),
        sa.Column("holder", _TEXT),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_skep_leases")),
    )


def _forbid_changes_on_sqlite() -> None:
    for table in _APPEND_ONLY:
        for change in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{change.lower()} BEFORE {change} ON {table}"
                f" BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
    # INSERT OR REPLACE removes the old row without calling the trigger on DELETE.
    for table, key in (
        ("skep_events", "hive_id = NEW.hive_id AND seq = NEW.seq"),
        ("skep_checkpoints", "hive_id = NEW.hive_id AND seq = NEW.seq AND key_id = NEW.key_id"),
    ):
        taken = f"EXISTS (SELECT 1 FROM {table} WHERE {key})"  # noqa: S608
        op.execute(
            f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} WHEN {taken}"
            f" BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        )


def _forbid_changes_on_postgresql() -> None:
    op.execute(
        "CREATE FUNCTION skep_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = 'integrity_constraint_violation';"
        " END $$"
    )
    for table in _APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION skep_refuse_change()"
        )
        op.execute(
            f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table}"
            " FOR EACH STATEMENT EXECUTE FUNCTION skep_refuse_change()"
        )
        # A session that replays replication would otherwise pass the triggers by.
        op.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {table}_no_change")
        op.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {table}_no_truncate")
