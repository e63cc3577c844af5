"""Which state stores work with a schema that is newer than they are.

A migration *expands* the schema if the state store before it still works: it adds a table, an index, or a
column that may be null or has a default. Every other migration *contracts* it, and calls `needs_revision`
with the revision of the first release that needs nothing of what it takes away. Neighboring minor versions
work together, so that release is at least one minor version older than the contraction.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Connection, Text, select, update
from sqlalchemy.schema import Table

from turboserve.state_store.tables import metadata

schema_compatibility = Table(
    "schema_compatibility", metadata, Column("oldest_revision", Text, primary_key=True)
)
"""One row: the revision that a state store must know to work with this schema."""


def needs_revision(revision: str) -> None:
    """Note in a migration that state stores which do not know `revision` no longer work with the schema."""
    op.execute(update(schema_compatibility).values(oldest_revision=revision))


def oldest_revision(connection: Connection) -> str:
    """Return the revision that a state store must know. The schema has revision 0033 or a newer one."""
    return str(connection.execute(select(schema_compatibility.c.oldest_revision)).scalar_one())
