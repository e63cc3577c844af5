"""Limits of API keys, the key and weight of a session, and use by day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "api_keys", sa.Column("limits", JSONB(), nullable=False, server_default=sa.text("'{}'::jsonb"))
    )
    op.create_table(
        "key_rates",
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("creations_full_at", sa.Double(), nullable=False, server_default=sa.text("0")),
        sa.Column("prompts_full_at", sa.Double(), nullable=False, server_default=sa.text("0")),
    )
    op.add_column("sessions", sa.Column("key", sa.Text()))
    op.add_column("sessions", sa.Column("weight", sa.Double(), nullable=False, server_default=sa.text("1")))
    op.create_index(
        "sessions_key",
        "sessions",
        ["key"],
        postgresql_where=sa.text("key is not null and ended_at is null"),
    )
    op.create_table(
        "usage_days",
        sa.Column("day", sa.Integer(), primary_key=True),
        sa.Column("tenant", sa.Text(), primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("gpu_seconds", sa.Double(), nullable=False, server_default=sa.text("0")),
        sa.Column("money", sa.Double(), nullable=False, server_default=sa.text("0")),
        sa.Column("chunks", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("viewer_seconds", sa.Double(), nullable=False, server_default=sa.text("0")),
    )
    op.create_index("usage_days_key", "usage_days", ["key", "day"])


def downgrade() -> None:
    op.drop_table("usage_days")
    op.drop_index("sessions_key", "sessions")
    op.drop_column("sessions", "weight")
    op.drop_column("sessions", "key")
    op.drop_table("key_rates")
    op.drop_column("api_keys", "limits")
