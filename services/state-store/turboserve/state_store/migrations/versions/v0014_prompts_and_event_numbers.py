"""Events have numbers of their own in each session, and prompts have ids and may be superseded."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Events of earlier versions have no number: those that follow begin at 1.
    number = sa.Column("event_sequence", sa.BigInteger(), nullable=False, server_default=sa.text("0"))
    op.add_column("sessions", number)
    op.alter_column("controls", "event_id", new_column_name="prompt_id")
    op.add_column("controls", sa.Column("superseded_by", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    # Earlier versions take a prompt without a time for one that a chunk is still to show.
    op.execute("update controls set applied_at = accepted_at where superseded_by is not null")
    op.drop_column("controls", "superseded_by")
    op.alter_column("controls", "prompt_id", new_column_name="event_id")
    op.drop_column("sessions", "event_sequence")
