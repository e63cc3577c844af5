"""Cost by seconds that were measured, and corrections of it; how far time has come for what ages."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

UNTIL = "greatest(started_at, coalesce(ended_at, seen_at))"


def upgrade() -> None:
    for name in ("paid_s", "starting_s", "estimated_s", "accrued_s", "source_s", "meter_s"):
        op.add_column("rentals", sa.Column(name, sa.Double(), nullable=False, server_default="0"))
    op.add_column("rentals", sa.Column("ready", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("rentals", sa.Column("source", sa.Text()))
    op.add_column("rentals", sa.Column("meter", sa.Text(), nullable=False, server_default=""))
    # Until now everything was the difference of wall clocks.
    op.execute(f"update rentals set paid_s = {UNTIL} - started_at, ready = ready_at is not null")
    op.execute(
        "update rentals set estimated_s = paid_s, "
        "starting_s = least(greatest(coalesce(ready_at - started_at, paid_s), 0), paid_s), "
        "accrued_s = least(greatest(accrued_until - started_at, 0), paid_s)"
    )
    op.drop_index("rentals_open", "rentals")
    for name in ("ready_at", "accrued_until"):
        op.drop_column("rentals", name)
    for name in ("paid_s", "starting_s", "estimated_s", "accrued_s", "source_s", "meter_s", "ready", "meter"):
        op.alter_column("rentals", name, server_default=None)
    op.create_index(
        "rentals_open",
        "rentals",
        ["pool"],
        postgresql_where=sa.text("ended_at is null or accrued_s < paid_s"),
    )
    op.create_table(
        "cost_corrections",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("session", sa.Text()),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.Column("money", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
    )
    op.create_index("cost_corrections_session", "cost_corrections", ["session"])
    op.create_table(
        "clocks",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("aged_to", sa.Double(), nullable=False),
        sa.Column("wall", sa.Double(), nullable=False),
    )
    op.add_column("pools", sa.Column("process", sa.Text()))
    op.add_column("pools", sa.Column("former", JSONB(), nullable=False, server_default=sa.text("'[]'")))


def downgrade() -> None:
    for name in ("process", "former"):
        op.drop_column("pools", name)
    op.drop_table("clocks")
    op.drop_table("cost_corrections")
    op.drop_index("rentals_open", "rentals")
    op.add_column("rentals", sa.Column("ready_at", sa.Double()))
    op.add_column("rentals", sa.Column("accrued_until", sa.Double(), nullable=False, server_default="0"))
    op.execute(
        "update rentals set seen_at = started_at + paid_s, accrued_until = started_at + accrued_s, "
        "ended_at = case when ended_at is null then null else started_at + paid_s end, "
        "ready_at = case when ready then started_at + starting_s end"
    )
    op.alter_column("rentals", "accrued_until", server_default=None)
    for name in (
        *("ready", "paid_s", "starting_s", "estimated_s", "accrued_s"),
        *("source", "source_s", "meter", "meter_s"),
    ):
        op.drop_column("rentals", name)
    op.create_index(
        "rentals_open",
        "rentals",
        ["pool"],
        postgresql_where=sa.text("ended_at is null or accrued_until < ended_at"),
    )
