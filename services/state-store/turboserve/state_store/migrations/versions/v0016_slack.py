"""Rows keep what an owner allows for quality and lead, and what a first chunk's deadline counts from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    dropped = sa.Column("drop_buffer_seq", sa.BigInteger(), nullable=False, server_default=sa.text("0"))
    op.add_column("sessions", dropped)
    op.add_column("sessions", sa.Column("quality", postgresql.JSONB(none_as_null=True)))
    op.add_column("sessions", sa.Column("max_lead_s", sa.Double()))
    op.add_column("sessions", sa.Column("requested_at", sa.Double()))


def downgrade() -> None:
    for name in ("requested_at", "max_lead_s", "quality", "drop_buffer_seq"):
        op.drop_column("sessions", name)
