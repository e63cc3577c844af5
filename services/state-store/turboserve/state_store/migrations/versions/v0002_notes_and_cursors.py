"""Decisions that change no row; how far a log has been read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_constraint("decisions_pkey", "decisions", type_="primary")
    op.add_column(
        "decisions", sa.Column("number", sa.BigInteger(), sa.Identity(always=True), primary_key=True)
    )
    op.create_primary_key("decisions_pkey", "decisions", ["number"])
    op.alter_column("decisions", "version", nullable=True)
    op.create_unique_constraint("decisions_session_version", "decisions", ["session", "version"])
    op.create_index("decisions_session_number", "decisions", ["session", "number"])
    op.create_table(
        "cursors",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("cursors")
    op.execute("delete from decisions where version is null")
    op.drop_index("decisions_session_number", "decisions")
    op.drop_constraint("decisions_session_version", "decisions", type_="unique")
    op.drop_constraint("decisions_pkey", "decisions", type_="primary")
    op.drop_column("decisions", "number")
    op.alter_column("decisions", "version", nullable=False)
    op.create_primary_key("decisions_pkey", "decisions", ["session", "version"])
