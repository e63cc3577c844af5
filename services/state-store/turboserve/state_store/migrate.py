"""Brings the schema up to date at every start. Several instances may do so at the same time.

A newer state store may have migrated the database already. An older one leaves such a schema as it is, and
works with it if the schema allows that: see `migrations/compatibility.py`.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from turboserve import logs
from turboserve.state_store.migrations.compatibility import oldest_revision

# Alembic logs several lines at every start. This module logs one line instead.
logging.getLogger("alembic").setLevel(logging.WARNING)
log = logs.get("migrate")

SCRIPTS = str(Path(__file__).with_name("migrations"))
LOCK = 0x7475_7262_0001
"""Number of the advisory lock. A second instance waits for it, and then finds nothing to do."""

# A large table takes as long as it takes. Postgres before version 17 does not know all of these.
_WITHOUT_LIMITS = text("""
    select set_config(name, '0', true) from pg_settings
    where name in ('statement_timeout', 'lock_timeout', 'transaction_timeout')
""")


class SchemaTooNewError(RuntimeError):
    """The database was migrated for newer state stores, and this one does not work with it."""


def config(connection: Connection) -> Config:
    """Return Alembic's configuration for the scripts in this package."""
    settings = Config()
    settings.set_main_option("script_location", SCRIPTS)
    settings.attributes["connection"] = connection
    return settings


@cache
def newest() -> str | None:
    """Return the revision of the schema that this code needs. The first call reads every migration."""
    return ScriptDirectory(SCRIPTS).get_current_head()


@cache
def known() -> frozenset[str]:
    """Return the revisions that this code knows."""
    return frozenset(one.revision for one in ScriptDirectory(SCRIPTS).walk_revisions())


async def migrate(engine: AsyncEngine) -> None:
    """Run all missing migrations in one transaction: either all take effect or none.

    A schema of a revision that this code does not know stays as it is. Raises SchemaTooNewError if it no
    longer supports this code.
    """
    async with engine.begin() as connection:
        await connection.execute(_WITHOUT_LIMITS)
        await connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK})
        before = await connection.run_sync(_revision)
        if before is not None and before not in known():
            await connection.run_sync(_check_newer)
        elif before != newest():
            await connection.run_sync(lambda sync: command.upgrade(config(sync), "head"))
        after = await connection.run_sync(_revision)
    log.info("schema", revision=after, was=before, code=newest())


def _check_newer(connection: Connection) -> None:
    oldest = oldest_revision(connection)
    if oldest not in known():
        raise SchemaTooNewError(
            f"the database has revision {_revision(connection)} and needs a state store that knows revision "
            f"{oldest}; this one knows revisions up to {newest()}: start a newer one, or restore the backup"
        )


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()
