"""What workers cost, sessions' shares of it, and what is ordered of each pool."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rentals",
        sa.Column("worker", sa.Text(), primary_key=True),
        sa.Column("pool", sa.Text()),
        sa.Column("slot", sa.Text()),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("gpus", sa.Double(), nullable=False),
        sa.Column("price_hour", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ready_at", sa.Double()),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double()),
        sa.Column("accrued_until", sa.Double(), nullable=False),
    )
    op.create_index(
        "rentals_open",
        "rentals",
        ["pool"],
        postgresql_where=sa.text("ended_at is null or accrued_until < ended_at"),
    )
    op.create_table(
        "session_costs",
        sa.Column("session", sa.Text(), primary_key=True),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.Column("money", sa.Double(), nullable=False),
    )
    op.create_table(
        "pools",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("version", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("override", sa.Integer()),
        sa.Column("dry_run", sa.Boolean()),
        sa.Column("table", JSONB()),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("maximum", sa.Integer(), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("pools")
    op.drop_table("session_costs")
    op.drop_table("rentals")
