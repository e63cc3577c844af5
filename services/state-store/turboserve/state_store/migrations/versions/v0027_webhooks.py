"""Webhooks and their deliveries. Waiting events name their tenant and type."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

_WAITING = sa.text("state = 'waiting'")


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False, unique=True),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("salt", sa.Text(), nullable=False),
        sa.Column("types", JSONB(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("disabled_reason", sa.Text()),
        sa.Column("previous_salt", sa.Text()),
        sa.Column("previous_until", sa.Double()),
        sa.Column("failures", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("failing_since", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.Text()),
        sa.Column("taken_at", sa.Double(), nullable=False, server_default=sa.text("0")),
    )
    op.create_index("webhooks_tenant", "webhooks", ["tenant"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), primary_key=True),
        sa.Column("webhook", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("session", sa.Text()),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False, server_default=sa.text("'waiting'")),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("attempted_at", sa.Double()),
        sa.Column("status", sa.Integer()),
        sa.Column("error", sa.Text()),
        sa.Column("finished_at", sa.Double()),
        sa.Column("claim", sa.Text()),
        sa.Column("claimed_until", sa.Double()),
        sa.Column("traceparent", sa.Text()),
        sa.UniqueConstraint("webhook", "event", name="webhook_deliveries_event"),
        sa.CheckConstraint(
            "state in ('waiting', 'delivered', 'failed')", name="webhook_delivery_state_known"
        ),
    )
    table = "webhook_deliveries"
    op.create_index("webhook_deliveries_newest", table, ["webhook", "number"])
    op.create_index("webhook_deliveries_due", table, ["webhook", "due_at"], postgresql_where=_WAITING)
    op.create_index(
        "webhook_deliveries_session", table, ["webhook", "session", "number"], postgresql_where=_WAITING
    )
    op.create_index(
        "webhook_deliveries_claimed",
        table,
        ["webhook"],
        postgresql_where=sa.text("state = 'waiting' and claimed_until is not null"),
    )
    op.create_index(
        "webhook_deliveries_finished",
        table,
        ["finished_at"],
        postgresql_where=sa.text("finished_at is not null"),
    )
    op.add_column("outbox", sa.Column("tenant", sa.Text()))
    op.add_column("outbox", sa.Column("type", sa.Text()))


def downgrade() -> None:
    op.drop_column("outbox", "type")
    op.drop_column("outbox", "tenant")
    op.drop_table("webhook_deliveries")
    op.drop_table("webhooks")
