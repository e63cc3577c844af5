"""Rows count how often the log has lost the fence of a current owner."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    losses = sa.Column("log_losses", sa.BigInteger(), nullable=False, server_default=sa.text("0"))
    op.add_column("sessions", losses)


def downgrade() -> None:
    op.drop_column("sessions", "log_losses")
