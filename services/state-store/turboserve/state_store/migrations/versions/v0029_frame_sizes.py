"""Workers declare the size of their frames."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("frame", JSONB()))


def downgrade() -> None:
    op.drop_column("workers", "frame")
