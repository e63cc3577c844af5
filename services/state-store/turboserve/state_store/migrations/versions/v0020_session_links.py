"""Links to sessions, and the keys that sign links and stream tickets."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "session_links",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("session", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.Text()),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double()),
    )
    op.create_index("session_links_session", "session_links", ["session"])
    op.create_index("session_links_expiry", "session_links", ["expires_at"])
    op.create_table(
        "signing_keys",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("signing_keys")
    op.drop_table("session_links")
    op.execute("delete from key_editions where name = 'links'")
