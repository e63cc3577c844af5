"""What one tenant takes: rates, and bytes of prompts and metadata."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    zero = sa.text("0")
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("creations_full_at", sa.Double(), nullable=False, server_default=zero),
        sa.Column("prompts_full_at", sa.Double(), nullable=False, server_default=zero),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False, server_default=zero),
    )
    op.execute(
        """
        insert into tenants (id, stored_bytes)
        select tenant, sum(
            octet_length(first_prompt)
            + coalesce((select sum(octet_length(key || value)) from jsonb_each_text(metadata)), 0)
            + coalesce((select sum(octet_length(prompt)) from controls where session = sessions.id), 0)
        )
        from sessions group by tenant
        """
    )


def downgrade() -> None:
    op.drop_table("tenants")
