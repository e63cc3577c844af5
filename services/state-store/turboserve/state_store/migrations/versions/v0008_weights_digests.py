"""Which weights a worker has, and which a session's state was made with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_TABLES = ("workers", "sessions")


def upgrade() -> None:
    # Of workers and sessions that are there already nothing is known: they are compared with nothing.
    for table in _TABLES:
        op.add_column(table, sa.Column("weights_digest", sa.Text(), nullable=True))


def downgrade() -> None:
    for table in _TABLES:
        op.drop_column(table, "weights_digest")
