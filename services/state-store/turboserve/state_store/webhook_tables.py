"""The tables of webhooks, in the metadata of `tables`."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from turboserve.state_store.tables import metadata

_WAITING = text("state = 'waiting'")

webhooks = Table(
    "webhooks",
    metadata,
    # `turboserve.contracts.webhooks` documents the columns. No row has a secret.
    Column("id", Text, primary_key=True),
    Column("number", BigInteger, Identity(always=True), nullable=False, unique=True),
    *(Column(name, Text, nullable=False) for name in ("tenant", "url", "label", "salt")),
    Column("types", JSONB, nullable=False),
    Column("enabled", Boolean, nullable=False),
    Column("disabled_reason", Text),
    Column("previous_salt", Text),
    Column("previous_until", Double),
    Column("failures", BigInteger, nullable=False, server_default=text("0")),
    Column("failing_since", Double),
    Column("created_at", Double, nullable=False),
    Column("created_by", Text),
    # When a sender took deliveries last, so that webhooks take turns.
    Column("taken_at", Double, nullable=False, server_default=text("0")),
    Index("webhooks_tenant", "tenant"),
)

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    # Without a foreign key: the outbox, which inserts rows, must not wait for a change of a webhook. Rows of
    # a deleted webhook are removed with it, and later ones by the retention.
    Column("number", BigInteger, Identity(always=True), primary_key=True),
    *(Column(name, Text, nullable=False) for name in ("webhook", "event", "type")),
    Column("session", Text),
    Column("body", Text, nullable=False),
    Column("state", Text, nullable=False, server_default=text("'waiting'")),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("created_at", Double, nullable=False),
    Column("due_at", Double, nullable=False),
    Column("attempted_at", Double),
    Column("status", Integer),
    Column("error", Text),
    Column("finished_at", Double),
    # The sender's claim, and its end.
    Column("claim", Text),
    Column("claimed_until", Double),
    Column("traceparent", Text),
    UniqueConstraint("webhook", "event", name="webhook_deliveries_event"),
    CheckConstraint("state in ('waiting', 'delivered', 'failed')", name="webhook_delivery_state_known"),
    Index("webhook_deliveries_newest", "webhook", "number"),
    Index("webhook_deliveries_due", "webhook", "due_at", postgresql_where=_WAITING),
    Index("webhook_deliveries_session", "webhook", "session", "number", postgresql_where=_WAITING),
    Index(
        "webhook_deliveries_claimed",
        "webhook",
        postgresql_where=text("state = 'waiting' and claimed_until is not null"),
    ),
    Index("webhook_deliveries_finished", "finished_at", postgresql_where=text("finished_at is not null")),
)
