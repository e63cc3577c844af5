"""Usage by day has the seconds of video and the bytes that viewers were sent."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    zero = sa.text("0")
    op.add_column("usage_days", sa.Column("video_seconds", sa.Double(), nullable=False, server_default=zero))
    op.add_column(
        "usage_days", sa.Column("delivered_bytes", sa.BigInteger(), nullable=False, server_default=zero)
    )


def downgrade() -> None:
    op.drop_column("usage_days", "delivered_bytes")
    op.drop_column("usage_days", "video_seconds")
