"""The tables of Skep's state, the same on SQLite and PostgreSQL.

Every table is called `skep_<noun>` on both databases, so one statement serves both. On SQLite the prefix
keeps them apart from the tables of libraries that may share the file; on PostgreSQL they live in the schema
`skep`, which is the whole search path of every connection.

Text is compared byte by byte on both (collation "C" on PostgreSQL, SQLite's default), so that ids and times
sort alike.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# Times are text in UTC, ISO 8601 with microseconds and a Z: one form in the row, the record and the export.
ByteText = Text().with_variant(Text(collation="C"), "postgresql")

accounts = Table(
    "skep_accounts",
    metadata,
    Column("id", ByteText, primary_key=True),
    Column("created_at", ByteText, nullable=False),
    Column("deleted_at", ByteText),
)

hives = Table(
    "skep_hives",
    metadata,
    Column("id", ByteText, primary_key=True),
    Column("account_id", ByteText, ForeignKey("skep_accounts.id"), nullable=False),
    Column("name", ByteText, nullable=False),
    Column("sandbox_enabled", Boolean, nullable=False),
    Column("file_memory_enabled", Boolean, nullable=False),
    Column("self_healing_enabled", Boolean, nullable=False),
    Column("skill_authoring_enabled", Boolean, nullable=False),
    Column("created_at", ByteText, nullable=False),
    Column("deleted_at", ByteText),
    # JSON of what the hive has chosen other than the usual (`Upkeep`).
    Column("upkeep", ByteText, nullable=False, server_default=text("'{}'")),
)
# Which rows an index leaves out is said in its migration alone: to say it here loads a database's whole dialect.
# A deleted hive keeps its row and its events; its name is free again.
Index("ix_skep_hives_name", hives.c.account_id, hives.c.name, unique=True)

rollouts = Table(
    "skep_rollouts",
    metadata,
    Column("flag", ByteText, primary_key=True),
    Column("percent", Integer, nullable=False),
    CheckConstraint("percent >= 0 AND percent <= 100", name="percent"),
)

events = Table(
    "skep_events",
    metadata,
    Column("hive_id", ByteText, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("account_id", ByteText, nullable=False),
    Column("task_id", ByteText),
    Column("type", ByteText, nullable=False),
    Column("at", ByteText, nullable=False),
    Column("actor", ByteText, nullable=False),
    Column("record", ByteText, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    PrimaryKeyConstraint("hive_id", "seq"),
    CheckConstraint("seq >= 1", name="seq"),
    CheckConstraint("length(hash) = 32", name="hash"),
)
Index("ix_skep_events_type", events.c.hive_id, events.c.type, events.c.seq)
Index("ix_skep_events_task", events.c.hive_id, events.c.task_id, events.c.seq)
Index("ix_skep_events_at", events.c.hive_id, events.c.at)

event_heads = Table(
    "skep_event_heads",
    metadata,
    Column("hive_id", ByteText, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("checkpoint_seq", BigInteger, nullable=False, server_default=text("0")),
)

checkpoints = Table(
    "skep_checkpoints",
    metadata,
    Column("hive_id", ByteText, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("at", ByteText, nullable=False),
    Column("key_id", ByteText, nullable=False),
    Column("signature", LargeBinary, nullable=False),
    PrimaryKeyConstraint("hive_id", "seq", "key_id"),
)

leases = Table(
    "skep_leases",
    metadata,
    Column("name", ByteText, primary_key=True),
    Column("holder", ByteText),
    Column("token", BigInteger, nullable=False),
    Column("expires_at", Double, nullable=False),
)

# A key (a hive, or one thread of it) bound to its workspace. The id is derived from account and key, so that a row that
# is lost can be found again; it is the workspace's id too.
sessions = Table(
    "skep_sessions",
    metadata,
    Column("id", ByteText, primary_key=True),
    Column("account_id", ByteText, ForeignKey("skep_accounts.id"), nullable=False),
    Column("hive_id", ByteText, ForeignKey("skep_hives.id"), nullable=False),
    Column("key", ByteText, nullable=False),
    Column("status", ByteText, nullable=False),
    # How often a sandbox was started for it.
    Column("generation", BigInteger, nullable=False),
    # That of the lease under which the row was last written: a smaller one is refused.
    Column("token", BigInteger, nullable=False),
    # Where the workspace lies, and which process runs its sandbox.
    Column("host", ByteText),
    Column("controller", ByteText),
    Column("archive", ByteText),
    # JSON: the shells and code contexts that were opened in it, each with the generation that it lived in.
    Column("rooms", ByteText, nullable=False, server_default=text("'{}'")),
    Column("resume_fail_count", Integer, nullable=False),
    Column("last_error", ByteText),
    Column("created_at", ByteText, nullable=False),
    Column("changed_at", ByteText, nullable=False),
    Column("active_at", ByteText, nullable=False),
    Column("healthy_at", ByteText),
    Column("unarchived_at", ByteText),
    Column("warned_at", ByteText),
)
Index("ix_skep_sessions_hive", sessions.c.hive_id, sessions.c.key)
Index("ix_skep_sessions_status", sessions.c.status, sessions.c.active_at)

# Hives whose sandboxes cannot be had: since when, and since when they do without.
outages = Table(
    "skep_outages",
    metadata,
    Column("hive_id", ByteText, ForeignKey("skep_hives.id"), primary_key=True),
    Column("since", ByteText, nullable=False),
    Column("flipped_at", ByteText),
    Column("last_error", ByteText, nullable=False),
)

# A prompt on its way to a reply. The row is the truth about a task; the engine that runs it is told.
tasks = Table(
    "skep_tasks",
    metadata,
    Column("id", ByteText, primary_key=True),
    Column("account_id", ByteText, ForeignKey("skep_accounts.id"), nullable=False),
    Column("hive_id", ByteText, ForeignKey("skep_hives.id"), nullable=False),
    Column("thread", ByteText, nullable=False),
    # The task that a person asked for (itself, or the one that its parents lead to), and the one that made it.
    Column("root", ByteText, nullable=False),
    Column("parent", ByteText),
    # What it was forked from, and the last step that it took over.
    Column("origin", ByteText),
    Column("step", Integer, nullable=False, server_default=text("0")),
    Column("prompt", ByteText, nullable=False),
    Column("title", ByteText, nullable=False, server_default=text("''")),
    # JSON: the ids of the tasks that come before it.
    Column("after", ByteText, nullable=False, server_default=text("'[]'")),
    Column("actor", ByteText, nullable=False),
    Column("status", ByteText, nullable=False),
    # What it does about the tasks before it in its thread.
    Column("same_thread", ByteText, nullable=False),
    # The state of the workspace before it, where that is kept.
    Column("checkpoint", ByteText),
    # JSON: what was set when it began, and holds until it ends.
    Column("agreement", ByteText),
    # Whether the engine knows of it.
    Column("enqueued", Boolean, nullable=False),
    # The process that has it, and how often one began it: whoever writes with a smaller number is refused.
    Column("worker", ByteText),
    Column("starts", BigInteger, nullable=False, server_default=text("0")),
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("reply", ByteText),
    Column("confidence", Double),
    Column("partial", Boolean, nullable=False),
    Column("scripted", Boolean, nullable=False),
    Column("error", ByteText),
    Column("usd", Double, nullable=False, server_default=text("0")),
    Column("unpriced", Integer, nullable=False, server_default=text("0")),
    Column("tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("idempotency_key", ByteText),
    Column("created_at", ByteText, nullable=False),
    Column("started_at", ByteText),
    Column("ended_at", ByteText),
)
Index("ix_skep_tasks_key", tasks.c.account_id, tasks.c.idempotency_key, unique=True)
Index("ix_skep_tasks_account", tasks.c.account_id, tasks.c.created_at)
Index("ix_skep_tasks_thread", tasks.c.hive_id, tasks.c.thread, tasks.c.created_at)
Index("ix_skep_tasks_root", tasks.c.root)
Index("ix_skep_tasks_status", tasks.c.status, tasks.c.enqueued, tasks.c.account_id)

# Which event of a task is on record under which name, so that a step that is taken again records nothing twice.
steps = Table(
    "skep_steps",
    metadata,
    Column("task_id", ByteText, ForeignKey("skep_tasks.id"), nullable=False),
    Column("key", ByteText, nullable=False),
    Column("seq", BigInteger, nullable=False),
    PrimaryKeyConstraint("task_id", "key"),
)
