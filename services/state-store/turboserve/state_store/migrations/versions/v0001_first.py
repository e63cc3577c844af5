"""Sessions with controls and decisions, workers, the outbox."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "outbox",
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("event_id", name="outbox_event_id"),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("first_prompt", sa.Text(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("metadata", JSONB(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("activity", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("own_revision", sa.BigInteger(), nullable=True),
        sa.Column("fence_revision", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("next_chunk", sa.BigInteger(), nullable=False),
        sa.Column("control_seq", sa.BigInteger(), nullable=False),
        sa.Column("applied_control_seq", sa.BigInteger(), nullable=False),
        sa.Column("state_digest", sa.Text(), nullable=True),
        sa.Column("playhead_s", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("purged_at", sa.Double(), nullable=True),
        sa.CheckConstraint(
            "phase in ('requested', 'active', 'migrating', 'suspended', 'terminated', 'failed')",
            name="phase_known",
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("number"),
    )
    op.create_index("sessions_live", "sessions", ["model"], postgresql_where=sa.text("ended_at is null"))
    op.create_index("sessions_tenant_number", "sessions", ["tenant", "number"])
    op.create_index(
        "sessions_unfenced",
        "sessions",
        ["id"],
        unique=False,
        postgresql_where=sa.text("own_revision is null and epoch > 0"),
    )
    op.create_index(
        "sessions_unpurged",
        "sessions",
        ["ended_at"],
        unique=False,
        postgresql_where=sa.text("purged_at is null"),
    )
    op.create_index("sessions_worker", "sessions", ["worker"], postgresql_where=sa.text("ended_at is null"))
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("capacity", sa.Integer(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("pool_slot", sa.Text(), nullable=True),
        sa.Column("chunk_latency_s", JSONB(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("renewed_at", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("gone_at", sa.Double(), nullable=True),
        sa.CheckConstraint("phase in ('starting', 'ready', 'draining', 'gone')", name="worker_phase_known"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("workers_model", "workers", ["model"])
    op.create_table(
        "controls",
        sa.Column("session", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("accepted_at", sa.Double(), nullable=False),
        sa.Column("applied_at", sa.Double(), nullable=True),
        sa.Column("chunk_index", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["session"], ["sessions.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("session", "seq"),
        sa.UniqueConstraint("event_id"),
    )
    op.create_table(
        "decisions",
        sa.Column("session", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("numbers", JSONB(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["session"], ["sessions.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("session", "version"),
    )


def downgrade() -> None:
    for table in ("decisions", "controls", "workers", "sessions", "outbox"):
        op.drop_table(table)
