"""Workers' rows keep how many sessions fit at lower fidelity, and pools' whether so many may come."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("floor_capacity", sa.Integer()))
    for name in ("absorbs", "absorbs_at_maximum"):
        flag: sa.Column[bool] = sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.text("false"))
        op.add_column("pools", flag)


def downgrade() -> None:
    op.drop_column("pools", "absorbs_at_maximum")
    op.drop_column("pools", "absorbs")
    op.drop_column("workers", "floor_capacity")
