"""Events have numbers of their own in each session, and prompts have ids and may be superseded."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

NAMES = ("event_id", "prompt_id")
"""Name of a prompt's id in its row and in the bodies of its events."""


def upgrade() -> None:
    # Events of earlier versions have no number: those that follow begin at 1.
    number = sa.Column("event_sequence", sa.BigInteger(), nullable=False, server_default=sa.text("0"))
    op.add_column("sessions", number)
    _rename(*NAMES)
    op.add_column("controls", sa.Column("superseded_by", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    # Earlier versions take a prompt without a time for one that a chunk is still to show.
    op.execute("update controls set applied_at = accepted_at where superseded_by is not null")
    op.drop_column("controls", "superseded_by")
    _rename(NAMES[1], NAMES[0])
    op.drop_column("sessions", "event_sequence")


def _rename(old: str, new: str) -> None:
    op.alter_column("controls", old, new_column_name=new)
    op.execute(
        f"update outbox set body = ((body::jsonb - '{old}')"
        f" || jsonb_build_object('{new}', body::jsonb -> '{old}'))::text"
        " where body::jsonb ->> 'type' in ('prompt.accepted', 'prompt.applied')"
        f" and jsonb_exists(body::jsonb, '{old}')"
    )
