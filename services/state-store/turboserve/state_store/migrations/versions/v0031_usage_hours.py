"""Usage by hour and model, and the cost of pools by model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    zero = sa.text("0")
    op.create_table(
        "usage_hours",
        sa.Column("hour", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("gpu_seconds", sa.Double(), nullable=False, server_default=zero),
        sa.Column("money", sa.Double(), nullable=False, server_default=zero),
        sa.Column("chunks", sa.BigInteger(), nullable=False, server_default=zero),
        sa.Column("viewer_seconds", sa.Double(), nullable=False, server_default=zero),
        sa.Column("video_seconds", sa.Double(), nullable=False, server_default=zero),
        sa.Column("delivered_bytes", sa.BigInteger(), nullable=False, server_default=zero),
        sa.PrimaryKeyConstraint("hour", "tenant", "key", "model"),
    )
    sums = "gpu_seconds, money, chunks, viewer_seconds, video_seconds, delivered_bytes"
    op.execute(
        f"insert into usage_hours (hour, tenant, key, model, {sums}) "
        f"select day * 24, tenant, key, '', {sums} from usage_days"
    )
    op.create_table(
        "pool_model_costs",
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.Column("money", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("pool", "model", "at"),
    )
    op.create_index("pool_model_costs_at", "pool_model_costs", ["at"])


def downgrade() -> None:
    op.drop_table("pool_model_costs")
    op.drop_table("usage_hours")
