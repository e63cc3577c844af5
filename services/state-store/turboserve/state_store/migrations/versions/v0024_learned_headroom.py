"""Pools keep what their autoscaler has learned, so that a restart does not learn anew."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("pools", sa.Column("learned", sa.Text()))


def downgrade() -> None:
    op.drop_column("pools", "learned")
