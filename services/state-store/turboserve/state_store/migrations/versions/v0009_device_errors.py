"""How many workers in a row died of a device error in a step for a session."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_COUNTS = ("device_errors", "device_error_chunk")


def upgrade() -> None:
    for name in _COUNTS:
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0"))
        op.add_column("sessions", column)
    op.add_column("sessions", sa.Column("device_error_at", sa.Double(), nullable=True))


def downgrade() -> None:
    for name in (*_COUNTS, "device_error_at"):
        op.drop_column("sessions", name)
