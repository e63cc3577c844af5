"""Bringing the schema up to date: at every start, by as many instances at once as there are."""

from __future__ import annotations

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from turboserve import logs

# What it says at every start is said here in one line.
logging.getLogger("alembic").setLevel(logging.WARNING)
log = logs.get("migrate")

LOCK = 0x7475_7262_0001
"""Number of the advisory lock; a second instance waits here and then finds nothing left to do."""


def config(connection: Connection) -> Config:
    """Alembic's configuration for the scripts in this package."""
    settings = Config()
    settings.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    settings.attributes["connection"] = connection
    return settings


async def migrate(engine: AsyncEngine) -> None:
    """Run what is missing, in one transaction: it is either all there or not at all."""
    async with engine.begin() as connection:
        await connection.execute(text("set local statement_timeout = 0"))
        await connection.execute(text("set local lock_timeout = 0"))
        await connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK})
        before = await connection.run_sync(_revision)
        await connection.run_sync(lambda sync: command.upgrade(config(sync), "head"))
        after = await connection.run_sync(_revision)
    log.info("schema", revision=after, was=before)


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()
