"""Rows keep since when a session is suspended: the forecast of free slots counts when it left."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("suspended_at", sa.Double()))


def downgrade() -> None:
    op.drop_column("sessions", "suspended_at")
