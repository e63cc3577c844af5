"""Pools' rows keep how many sessions their decode workers carry."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("pools", sa.Column("decode_sessions", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("pools", "decode_sessions")
