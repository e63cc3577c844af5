"""Recordings, and which of them runs for a session."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "recordings",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False, unique=True),
        sa.Column("session", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("from_chunk", sa.BigInteger(), nullable=False),
        sa.Column("until_chunk", sa.BigInteger()),
        sa.Column("next_chunk", sa.BigInteger(), nullable=False),
        sa.Column("chunks", sa.BigInteger(), nullable=False),
        sa.Column("missing_chunks", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("parts", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("completed_at", sa.Double()),
        sa.Column("expires_at", sa.Double()),
        sa.CheckConstraint(
            "state in ('recording', 'stopping', 'complete', 'deleting')", name="recording_state_known"
        ),
    )
    op.create_index("recordings_tenant_number", "recordings", ["tenant", "number"])
    op.create_index("recordings_session", "recordings", ["session"])
    op.create_index(
        "recordings_ordered", "recordings", ["number"], postgresql_where=sa.text("state <> 'complete'")
    )
    op.create_index(
        "recordings_expiring", "recordings", ["expires_at"], postgresql_where=sa.text("state = 'complete'")
    )
    op.add_column("sessions", sa.Column("recording", sa.Text()))


def downgrade() -> None:
    op.drop_column("sessions", "recording")
    op.drop_table("recordings")
