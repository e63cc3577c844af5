"""The audit log of changes to keys, links, pools, costs and owners of sessions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False, unique=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("operation", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key", sa.Text()),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("change", sa.Text(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("code", sa.Text()),
    )
    op.create_index("audit_log_at", "audit_log", ["at"])


def downgrade() -> None:
    op.drop_table("audit_log")
