"""Tables of who may do what, and of who did it. `tables` has the others."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData()
"""Of all tables, also those of `tables`."""

api_keys = Table(
    "api_keys",
    metadata,
    # `turboserve.contracts.keys` documents the columns. No row has the text of a key.
    Column("id", Text, primary_key=True),
    Column("number", BigInteger, Identity(always=True), nullable=False, unique=True),
    Column("tenant", Text, nullable=False),
    Column("hash", Text, nullable=False),
    Column("scopes", JSONB, nullable=False),
    Column("label", Text, nullable=False),
    Column("limits", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("last_used_at", Double),
    UniqueConstraint("hash", name="api_keys_hash"),
)

key_rates = Table(
    "key_rates",
    metadata,
    # One row per key that has limited a rate. `core.key_limits.KeyRates` documents the columns.
    Column("key", Text, primary_key=True),
    Column("creations_full_at", Double, nullable=False, server_default=text("0")),
    Column("prompts_full_at", Double, nullable=False, server_default=text("0")),
)

usage_days = Table(
    "usage_days",
    metadata,
    # What the sessions of one tenant and key have used in one day of UTC. Rows outlive sessions and keys.
    # `day`: days since 1 January 1970. `key`: '' for sessions without a key.
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("tenant", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("gpu_seconds", Double, nullable=False, server_default=text("0")),
    Column("money", Double, nullable=False, server_default=text("0")),
    Column("chunks", BigInteger, nullable=False, server_default=text("0")),
    Column("viewer_seconds", Double, nullable=False, server_default=text("0")),
    Column("video_seconds", Double, nullable=False, server_default=text("0")),
    Column("delivered_bytes", BigInteger, nullable=False, server_default=text("0")),
    Index("usage_days_key", "key", "day"),
)

usage_hours = Table(
    "usage_hours",
    metadata,
    # The same by hour and model. `hour`: hours since 1 January 1970. `model` '': counted before 0031.
    Column("hour", Integer, primary_key=True, autoincrement=False),
    *(Column(name, Text, primary_key=True) for name in ("tenant", "key", "model")),
    Column("gpu_seconds", Double, nullable=False, server_default=text("0")),
    Column("money", Double, nullable=False, server_default=text("0")),
    Column("chunks", BigInteger, nullable=False, server_default=text("0")),
    Column("viewer_seconds", Double, nullable=False, server_default=text("0")),
    Column("video_seconds", Double, nullable=False, server_default=text("0")),
    Column("delivered_bytes", BigInteger, nullable=False, server_default=text("0")),
)

key_editions = Table(
    "key_editions",
    metadata,
    # `api_keys`: the salt of all hashes, and a number that every creation, change and revocation raises.
    # `links`: a random name of the database, and a number that every revocation and new signing key raises.
    Column("name", Text, primary_key=True),
    Column("salt", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
)

session_links = Table(
    "session_links",
    metadata,
    # `turboserve.contracts.links` documents the columns. No row has the text of a link.
    Column("id", Text, primary_key=True),
    Column("number", BigInteger, Identity(always=True), nullable=False),
    Column("session", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", Text),
    Column("expires_at", Double, nullable=False),
    Column("revoked_at", Double),
    Index("session_links_session", "session"),
    Index("session_links_expiry", "expires_at"),
)

signing_keys = Table(
    "signing_keys",
    metadata,
    # The newest key signs links and tickets. Who reads this table can sign some.
    Column("id", Text, primary_key=True),
    Column("secret", Text, nullable=False),
    Column("created_at", Double, nullable=False),
)

audit_log = Table(
    "audit_log",
    metadata,
    # `turboserve.contracts.audit` documents the columns.
    Column("id", Text, primary_key=True),
    Column("number", BigInteger, Identity(always=True), nullable=False, unique=True),
    Column("at", Double, nullable=False),
    Column("operation", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("key", Text),
    Column("address", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("change", Text, nullable=False),
    Column("status", Integer, nullable=False),
    Column("code", Text),
    Index("audit_log_at", "at"),
)
