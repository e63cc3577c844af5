"""A secret of each migration, by which its two workers recognize each other."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A migration that is under way has none: its target gives it up, and the session stays where it is.
    op.add_column("sessions", sa.Column("migration_key", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("sessions", "migration_key")
