"""The schema says which state stores work with it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table("schema_compatibility", sa.Column("oldest_revision", sa.Text(), primary_key=True))
    op.execute("insert into schema_compatibility (oldest_revision) values ('0033')")


def downgrade() -> None:
    op.drop_table("schema_compatibility")
