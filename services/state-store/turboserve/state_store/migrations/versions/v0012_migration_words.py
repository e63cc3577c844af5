"""A session's change of worker is a migration, and a worker's place in a pool is a member, in every row."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

COLUMNS = (
    ("sessions", "move", "migration"),
    ("workers", "pool_slot", "pool_member"),
    ("rentals", "slot", "member"),
)
CONSTRAINT = ("target_with_move", "target_with_migration")
KIND = ("moved", "migrated")
"""Kind of the decision that commits a migration."""
NUMBERS = (
    ("move", "migration"),
    ("bytes_moved", "bytes_copied"),
    ("moves_together", "migrations_together"),
)
"""Keys in the numbers of decisions."""
TYPES = (
    ("session.moved", "session.migrated"),
    ("session.move_abandoned", "session.migration_abandoned"),
)
"""Types of events. Their ids stay: an id recognizes an event that was published before the upgrade."""
IN_BODIES = (("record", "move", "migration"), ("worker", "pool_slot", "pool_member"))
"""Object in an event's body, with the names of its field."""
SCHEMA_VERSION = "1.0"
"""Version of the messages with these words."""


def upgrade() -> None:
    for table, old, new in COLUMNS:
        op.alter_column(table, old, new_column_name=new)
    _rename_constraint(*CONSTRAINT)
    _rename_in_rows(KIND, NUMBERS, TYPES, tuple((inside, old, new) for inside, old, new in IN_BODIES))
    # Readers refuse a message without a version.
    op.execute(
        f"""update outbox set body = (jsonb_build_object('schema_version', '{SCHEMA_VERSION}')"""
        " || body::jsonb)::text where not jsonb_exists(body::jsonb, 'schema_version')"
    )


def downgrade() -> None:
    op.execute("update outbox set body = (body::jsonb - 'schema_version')::text")
    _rename_in_rows(
        (KIND[1], KIND[0]),
        tuple((new, old) for old, new in NUMBERS),
        tuple((new, old) for old, new in TYPES),
        tuple((inside, new, old) for inside, old, new in IN_BODIES),
    )
    _rename_constraint(CONSTRAINT[1], CONSTRAINT[0])
    for table, old, new in COLUMNS:
        op.alter_column(table, new, new_column_name=old)


def _rename_constraint(old: str, new: str) -> None:
    op.execute(f"alter table sessions rename constraint {old} to {new}")


def _rename_in_rows(
    kind: tuple[str, str],
    numbers: tuple[tuple[str, str], ...],
    types: tuple[tuple[str, str], ...],
    in_bodies: tuple[tuple[str, str, str], ...],
) -> None:
    op.execute(f"update decisions set kind = '{kind[1]}' where kind = '{kind[0]}'")
    for old, new in numbers:
        op.execute(
            f"update decisions set numbers = (numbers - '{old}')"
            f" || jsonb_build_object('{new}', numbers -> '{old}') where jsonb_exists(numbers, '{old}')"
        )
    for old, new in types:
        op.execute(
            f"""update outbox set body = jsonb_set(body::jsonb, '{{type}}', '"{new}"')::text"""
            f" where body::jsonb ->> 'type' = '{old}'"
        )
    for inside, old, new in in_bodies:
        part = f"body::jsonb -> '{inside}'"
        op.execute(
            f"update outbox set body = jsonb_set(body::jsonb, '{{{inside}}}', (({part}) - '{old}')"
            f" || jsonb_build_object('{new}', {part} -> '{old}'))::text"
            f" where jsonb_typeof({part}) = 'object' and jsonb_exists({part}, '{old}')"
        )
