"""The tables, but those of `access_tables`. The records in `turboserve.contracts` document the columns."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from turboserve.state_store.access_tables import metadata as metadata

sessions = Table(
    "sessions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("number", BigInteger, Identity(always=True), nullable=False, unique=True),
    Column("tenant", Text, nullable=False),
    Column("model", Text, nullable=False),
    # The prompt at creation, by which a repeated request is recognized even after the prompt has changed.
    Column("first_prompt", Text, nullable=False),
    Column("prompt", Text, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("metadata", JSONB, nullable=False),
    Column("phase", Text, nullable=False),
    Column("activity", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("worker", Text),
    Column("target", Text),
    Column("migration", BigInteger),
    # The secret of the migration, for its two workers only: no record contains it. NULL: no migration.
    Column("migration_key", Text),
    # NULL until `own.<session>` is in the log for the row's epoch.
    Column("own_revision", BigInteger),
    # Greatest revision that `own.<session>` ever had, lost ones included. The next one is greater.
    Column("fence_revision", BigInteger, nullable=False, server_default=text("0")),
    # How often `own.<session>` of a current epoch was missing in the log.
    Column("log_losses", BigInteger, nullable=False, server_default=text("0")),
    Column("next_chunk", BigInteger, nullable=False),
    Column("control_seq", BigInteger, nullable=False),
    Column("applied_control_seq", BigInteger, nullable=False),
    Column("event_sequence", BigInteger, nullable=False, server_default=text("0")),
    Column("drop_buffer_seq", BigInteger, nullable=False, server_default=text("0")),
    Column("controls", JSONB, nullable=False, server_default=text("'{}'")),
    # UTF-8 bytes of the values at creation, which the tenant gets back when the row is deleted.
    Column("controls_bytes", BigInteger, nullable=False, server_default=text("0")),
    Column("quality", JSONB(none_as_null=True)),
    Column("max_lead_s", Double),
    Column("recording", Text),
    # The API key that created the session.
    Column("key", Text),
    Column("weight", Double, nullable=False, server_default=text("1")),
    Column("requested_at", Double),
    Column("state_digest", Text),
    Column("weights_digest", Text),
    Column("device_errors", BigInteger, nullable=False, server_default=text("0")),
    Column("device_error_at", Double),
    Column("device_error_chunk", BigInteger, nullable=False, server_default=text("0")),
    Column("playhead_s", Double, nullable=False),
    Column("reason", Text),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("ended_at", Double),
    # Since when the session is suspended. NULL: it is not, or an earlier version suspended it.
    Column("suspended_at", Double),
    # W3C trace contexts of requests that other services continue. NULL: not traced.
    Column("traceparent", Text),
    Column("prompt_traceparent", Text),
    Column("migration_traceparent", Text),
    # When the chunks of an ended session were removed from the log.
    Column("purged_at", Double),
    CheckConstraint(
        "phase in ('requested', 'active', 'migrating', 'suspended', 'terminated', 'failed')",
        name="phase_known",
    ),
    CheckConstraint("(target is null) = (migration is null)", name="target_with_migration"),
    Index("sessions_tenant_number", "tenant", "number"),
    Index("sessions_worker", "worker", postgresql_where=text("ended_at is null")),
    Index("sessions_key", "key", postgresql_where=text("key is not null and ended_at is null")),
    Index("sessions_target", "target", postgresql_where=text("target is not null")),
    Index("sessions_live", "model", postgresql_where=text("ended_at is null")),
    Index("sessions_unfenced", "id", postgresql_where=text("own_revision is null and epoch > 0")),
    Index("sessions_unpurged", "ended_at", postgresql_where=text("purged_at is null")),
    Index("sessions_purged", "ended_at", "number", postgresql_where=text("purged_at is not null")),
)

tenants = Table(
    "tenants",
    metadata,
    # One row per tenant that has rows of sessions or has requested one lately. For the columns, see
    # `core.tenants.Tenant`.
    Column("id", Text, primary_key=True),
    Column("creations_full_at", Double, nullable=False, server_default=text("0")),
    Column("prompts_full_at", Double, nullable=False, server_default=text("0")),
    Column("stored_bytes", BigInteger, nullable=False, server_default=text("0")),
)

controls = Table(
    "controls",
    metadata,
    Column("session", Text, ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("prompt_id", Text, nullable=False, unique=True),
    Column("kind", Text, nullable=False),
    # Name of the control. NULL: a prompt.
    Column("name", Text),
    # The prompt, or the control's value as JSON.
    Column("prompt", Text, nullable=False),
    Column("accepted_at", Double, nullable=False),
    # The first chunk that shows it, and when the log had that chunk.
    Column("applied_at", Double),
    Column("chunk_index", BigInteger),
    # `seq` of the prompt, or of the control's value, that took effect before any chunk showed this one.
    Column("superseded_by", BigInteger),
)

decisions = Table(
    "decisions",
    metadata,
    Column("number", BigInteger, Identity(always=True), primary_key=True),
    Column("session", Text, ForeignKey("sessions.id", ondelete="CASCADE"), nullable=False),
    # Version of the row that the decision made, by which a repeated request is recognized. NULL: no change.
    Column("version", BigInteger),
    Column("epoch", BigInteger, nullable=False),
    Column("worker", Text),
    Column("kind", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("numbers", JSONB, nullable=False),
    Column("at", Double, nullable=False),
    UniqueConstraint("session", "version", name="decisions_session_version"),
    Index("decisions_session_number", "session", "number"),
    Index("decisions_migrations", "at", postgresql_where=text("kind = 'migrate'")),
)

cursors = Table(
    "cursors",
    metadata,
    # How far a log has been read. Updated in the transaction that writes what was read.
    Column("name", Text, primary_key=True),
    Column("sequence", BigInteger, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("model", Text, nullable=False),
    Column("phase", Text, nullable=False),
    Column("capacity", Integer, nullable=False),
    Column("weights_digest", Text),
    Column("controls", JSONB, nullable=False, server_default=text("'[]'")),
    # NULL: the worker loads its model, or is of an earlier version.
    Column("frame", JSONB(none_as_null=True)),
    # NULL: the worker serves `model` alone.
    Column("classes", JSONB(none_as_null=True)),
    Column("device", Text, nullable=False),
    Column("pid", BigInteger),
    Column("pool_member", Text),
    Column("chunk_latency_s", JSONB, nullable=False),
    # NULL: the worker lowers no quality.
    Column("floor_capacity", Integer),
    Column("transfer", JSONB, nullable=False, server_default=text("'[]'")),
    Column("host", Text, nullable=False, server_default=text("''")),
    Column("started_at", Double, nullable=False),
    Column("renewed_at", Double, nullable=False),
    Column("reason", Text),
    Column("gone_at", Double),
    CheckConstraint("phase in ('starting', 'ready', 'draining', 'gone')", name="worker_phase_known"),
    Index("workers_model", "model"),
)

leaders = Table(
    "leaders",
    metadata,
    # A change of holder raises `term`, a renewal raises `beat`. Observers measure the time between changes.
    Column("name", Text, primary_key=True),
    Column("holder", Text),
    Column("term", BigInteger, nullable=False),
    Column("beat", BigInteger, nullable=False),
)

rentals = Table(
    "rentals",
    metadata,
    # One row per worker, from its launch on. `core.rentals.RentalRow` documents the columns.
    Column("worker", Text, primary_key=True),
    Column("pool", Text),
    Column("member", Text),
    Column("kind", Text, nullable=False),
    Column("gpus", Double, nullable=False),
    Column("price_hour", Double, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("ready", Boolean, nullable=False),
    Column("paid_s", Double, nullable=False),
    Column("starting_s", Double, nullable=False),
    Column("estimated_s", Double, nullable=False),
    Column("accrued_s", Double, nullable=False),
    Column("source", Text),
    Column("source_s", Double, nullable=False),
    Column("meter", Text, nullable=False),
    Column("meter_s", Double, nullable=False),
    Index("rentals_open", "pool", postgresql_where=text("ended_at is null or accrued_s < paid_s")),
)

session_costs = Table(
    "session_costs",
    metadata,
    # A row outlives its session: the sum of all shares must not shrink when old sessions are deleted.
    Column("session", Text, primary_key=True),
    Column("gpu_seconds", Double, nullable=False),
    Column("money", Double, nullable=False),
)

cost_corrections = Table(
    "cost_corrections",
    metadata,
    # Rows are only added: a wrong correction is undone by another one.
    Column("id", Text, primary_key=True),
    Column("number", BigInteger, Identity(always=True), nullable=False),
    Column("session", Text),
    Column("gpu_seconds", Double, nullable=False),
    Column("money", Double, nullable=False),
    Column("reason", Text, nullable=False),
    Column("by", Text, nullable=False),
    Column("at", Double, nullable=False),
    Index("cost_corrections_session", "session"),
)

clocks = Table(
    "clocks",
    metadata,
    # The aging time: see `core.aging`.
    Column("name", Text, primary_key=True),
    Column("aged_to", Double, nullable=False),
    Column("wall", Double, nullable=False),
)

pools = Table(
    "pools",
    metadata,
    Column("id", Text, primary_key=True),
    # Orders of operators.
    Column("version", BigInteger, nullable=False, server_default=text("0")),
    Column("override", Integer),
    Column("dry_run", Boolean),
    Column("table", JSONB),
    # The last report of the pool.
    Column("model", Text, nullable=False),
    Column("maximum", Integer, nullable=False),
    Column("reported_at", Double, nullable=False),
    Column("absorbs", Boolean, nullable=False, server_default=text("false")),
    Column("absorbs_at_maximum", Boolean, nullable=False, server_default=text("false")),
    # NULL: no decode workers limit the pool.
    Column("decode_sessions", BigInteger),
    # The process that reports, and the processes that it has replaced.
    Column("process", Text),
    Column("former", JSONB, nullable=False, server_default=text("'[]'")),
    # What the autoscaler has learned, in a format of its own.
    Column("learned", Text),
)

outbox = Table(
    "outbox",
    metadata,
    # Events of one subject are written under the lock of their session's or worker's row, so that their
    # numbers have the order of commits.
    Column("number", BigInteger, Identity(always=True), primary_key=True),
    Column("event_id", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    # W3C trace context of the change. NULL: not traced.
    Column("traceparent", Text),
    # What decides about webhooks. NULL: an event of a worker, or of an earlier version.
    Column("tenant", Text),
    Column("type", Text),
    UniqueConstraint("event_id", name="outbox_event_id"),
)
