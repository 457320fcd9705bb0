"""Keep tasks, and which of their steps are on record."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table("skep_tasks", *_whose(), *_what(), *_progress(), *_outcome(), *_keys())
    op.create_index("ix_skep_tasks_key", "skep_tasks", ["account_id", "idempotency_key"], unique=True)
    op.create_index("ix_skep_tasks_account", "skep_tasks", ["account_id", "created_at"])
    op.create_index("ix_skep_tasks_thread", "skep_tasks", ["hive_id", "thread", "created_at"])
    op.create_index("ix_skep_tasks_root", "skep_tasks", ["root"])
    op.create_index("ix_skep_tasks_status", "skep_tasks", ["status", "enqueued", "account_id"])
    op.create_table(
        "skep_steps",
        sa.Column("task_id", _TEXT, nullable=False),
        sa.Column("key", _TEXT, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("task_id", "key", name=op.f("pk_skep_steps")),
        sa.ForeignKeyConstraint(["task_id"], ["skep_tasks.id"], name=op.f("fk_skep_steps_task_id")),
    )


def _whose() -> tuple[sa.Column[str], ...]:
    return (
        sa.Column("id", _TEXT, nullable=False),
        sa.Column("account_id", _TEXT, nullable=False),
        sa.Column("hive_id", _TEXT, nullable=False),
        sa.Column("thread", _TEXT, nullable=False),
        sa.Column("root", _TEXT, nullable=False),
        sa.Column("parent", _TEXT),
        sa.Column("origin", _TEXT),
    )


def _what() -> tuple[sa.Column[object], ...]:
    return (
        sa.Column("step", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("prompt", _TEXT, nullable=False),
        sa.Column("title", _TEXT, nullable=False, server_default=sa.text("''")),
        sa.Column("after", _TEXT, nullable=False, server_default=sa.text("'[]'")),
        sa.Column("actor", _TEXT, nullable=False),
    )


def _progress() -> tuple[sa.Column[object], ...]:
    return (
        sa.Column("status", _TEXT, nullable=False),
        sa.Column("same_thread", _TEXT, nullable=False),
        sa.Column("checkpoint", _TEXT),
        sa.Column("agreement", _TEXT),
        sa.Column("enqueued", sa.Boolean, nullable=False),
        sa.Column("worker", _TEXT),
        sa.Column("starts", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("attempt", sa.Integer, nullable=False, server_default=sa.text("0")),
    )


def _outcome() -> tuple[sa.Column[object], ...]:
    return (
        sa.Column("reply", _TEXT),
        sa.Column("confidence", sa.Double),
        sa.Column("partial", sa.Boolean, nullable=False),
        sa.Column("scripted", sa.Boolean, nullable=False),
        sa.Column("error", _TEXT),
        sa.Column("usd", sa.Double, nullable=False, server_default=sa.text("0")),
        sa.Column("unpriced", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("tokens", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    )


def _keys() -> tuple[sa.schema.SchemaItem, ...]:
    return (
        sa.Column("idempotency_key", _TEXT),
        sa.Column("created_at", _TEXT, nullable=False),
        sa.Column("started_at", _TEXT),
        sa.Column("ended_at", _TEXT),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_skep_tasks")),
        sa.ForeignKeyConstraint(["account_id"], ["skep_accounts.id"], name=op.f("fk_skep_tasks_account_id")),
        sa.ForeignKeyConstraint(["hive_id"], ["skep_hives.id"], name=op.f("fk_skep_tasks_hive_id")),
    )
