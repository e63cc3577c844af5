"""Sessions that move between workers; where a worker gives state away."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("target", sa.Text(), nullable=True))
    op.add_column("sessions", sa.Column("move", sa.BigInteger(), nullable=True))
    op.create_check_constraint("target_with_move", "sessions", "(target is null) = (move is null)")
    op.create_index("sessions_target", "sessions", ["target"], postgresql_where=sa.text("target is not null"))
    # The defaults are for the rows that are there, and for an older state store that still runs beside.
    op.add_column("workers", sa.Column("transfer", JSONB(), nullable=False, server_default=sa.text("'[]'")))
    op.add_column("workers", sa.Column("host", sa.Text(), nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    op.execute(
        "update sessions set phase = 'active', version = version + 1, move = null, target = null"
        " where phase = 'migrating'"
    )
    op.drop_column("workers", "host")
    op.drop_column("workers", "transfer")
    op.drop_index("sessions_target", "sessions")
    op.drop_constraint("target_with_move", "sessions", type_="check")
    op.drop_column("sessions", "move")
    op.drop_column("sessions", "target")
