"""A recording says whether its session failed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    no = sa.text("false")
    op.add_column("recordings", sa.Column("session_failed", sa.Boolean(), nullable=False, server_default=no))


def downgrade() -> None:
    op.drop_column("recordings", "session_failed")
