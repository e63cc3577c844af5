"""Trace contexts of sessions and of events in the outbox."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    for name in ("traceparent", "prompt_traceparent", "migration_traceparent"):
        op.add_column("sessions", sa.Column(name, sa.Text))
    op.add_column("outbox", sa.Column("traceparent", sa.Text))


def downgrade() -> None:
    op.drop_column("outbox", "traceparent")
    for name in ("migration_traceparent", "prompt_traceparent", "traceparent"):
        op.drop_column("sessions", name)
