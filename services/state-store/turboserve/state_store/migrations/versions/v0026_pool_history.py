"""The history of pools: samples, decisions, chunks of workers, cost. An index finds past migrations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    whole = sa.BigInteger
    op.create_table(
        "pool_samples",
        sa.Column("pool", sa.Text(), primary_key=True),
        sa.Column("at", whole(), primary_key=True, autoincrement=False),
        *(sa.Column(name, whole(), nullable=False) for name in ("ready", "starting", "draining", "target")),
        *(sa.Column(name, whole()) for name in ("capacity", "required", "waiting")),
        *(
            sa.Column(name, sa.Double())
            for name in ("rho_max", "quality_debt", "deficit", "volatility", "target_utilization")
        ),
    )
    op.create_table(
        "pool_decisions",
        sa.Column("pool", sa.Text(), primary_key=True),
        sa.Column("process", sa.Text(), primary_key=True),
        sa.Column("process_number", whole(), primary_key=True, autoincrement=False),
        sa.Column("number", whole(), sa.Identity(always=True), nullable=False, unique=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        *(sa.Column(name, whole()) for name in ("target", "previous", "advice")),
        *(sa.Column(name, sa.Text()) for name in ("member", "worker")),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("numbers", JSONB(), nullable=False, server_default=sa.text("'{}'")),
    )
    op.create_table(
        "worker_chunks",
        sa.Column("worker", sa.Text(), primary_key=True),
        sa.Column("at", whole(), primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.Integer(), nullable=False) for name in ("chunks", "late", "lowered")),
        sa.Column("body", sa.Text(), nullable=False),
    )
    op.create_table(
        "pool_costs",
        sa.Column("pool", sa.Text(), primary_key=True),
        sa.Column("tenant", sa.Text(), primary_key=True),
        sa.Column("at", whole(), primary_key=True, autoincrement=False),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.Column("money", sa.Double(), nullable=False),
    )
    for table in ("pool_samples", "pool_decisions", "worker_chunks", "pool_costs"):
        op.create_index(f"{table}_at", table, ["at"])
    migrates = sa.text("kind = 'migrate'")
    op.create_index("decisions_migrations", "decisions", ["at"], postgresql_where=migrates)


def downgrade() -> None:
    op.drop_index("decisions_migrations", "decisions")
    for table in ("pool_costs", "worker_chunks", "pool_decisions", "pool_samples"):
        op.drop_table(table)
