"""Rows of ended sessions are found by their end, and count among their tenant's bytes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    purged = sa.text("purged_at is not null")
    op.create_index("sessions_purged", "sessions", ["ended_at", "number"], postgresql_where=purged)
    _add_rows("+")


def downgrade() -> None:
    _add_rows("-")
    op.drop_index("sessions_purged")


def _add_rows(sign: str) -> None:
    rows = "(select count(*) from sessions where tenant = tenants.id)"
    op.execute(f"update tenants set stored_bytes = greatest(stored_bytes {sign} 1024 * {rows}, 0)")
