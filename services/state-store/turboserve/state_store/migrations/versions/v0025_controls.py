"""Sessions have values of typed controls, and workers declare the controls of their model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    values = sa.Column("controls", JSONB(), nullable=False, server_default=sa.text("'{}'"))
    op.add_column("sessions", values)
    declared = sa.Column("controls", JSONB(), nullable=False, server_default=sa.text("'[]'"))
    op.add_column("workers", declared)
    op.add_column("controls", sa.Column("name", sa.Text()))


def downgrade() -> None:
    # Earlier versions take each row for a prompt. Their prompts have receipts already.
    op.execute("delete from controls where name is not null")
    op.drop_column("controls", "name")
    op.drop_column("workers", "controls")
    op.drop_column("sessions", "controls")
