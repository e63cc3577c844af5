"""Workers that serve several classes declare them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("classes", JSONB()))


def downgrade() -> None:
    op.drop_column("workers", "classes")
