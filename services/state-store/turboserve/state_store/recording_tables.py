"""The table of recordings, in the metadata of `tables`."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Identity,
    Index,
    Table,
    Text,
    text,
)

from turboserve.state_store.tables import metadata

recordings = Table(
    "recordings",
    metadata,
    # A row outlives its session's. `turboserve.contracts.recordings` documents the columns.
    Column("id", Text, primary_key=True),
    Column("number", BigInteger, Identity(always=True), nullable=False, unique=True),
    *(Column(name, Text, nullable=False) for name in ("session", "tenant", "model", "prompt", "state")),
    Column("from_chunk", BigInteger, nullable=False),
    Column("until_chunk", BigInteger),
    *(Column(name, BigInteger, nullable=False) for name in ("next_chunk", "chunks", "missing_chunks")),
    Column("bytes", BigInteger, nullable=False),
    Column("duration_s", Double, nullable=False),
    Column("parts", BigInteger, nullable=False),
    Column("reason", Text),
    Column("session_failed", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("completed_at", Double),
    Column("expires_at", Double),
    CheckConstraint(
        "state in ('recording', 'stopping', 'complete', 'deleting')", name="recording_state_known"
    ),
    Index("recordings_tenant_number", "tenant", "number"),
    Index("recordings_session", "session"),
    Index("recordings_ordered", "number", postgresql_where=text("state <> 'complete'")),
    Index("recordings_expiring", "expires_at", postgresql_where=text("state = 'complete'")),
)
