"""Sends assignments to workers at once, at most once. The next renewal repairs a lost one."""

from __future__ import annotations

import nats

from turboserve import logs
from turboserve.bus import Bus
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import Assignment, Incoming, MigrationKey
from turboserve.state_store.hot.playheads import Playheads
from turboserve.state_store.ports.database import Database
from turboserve.subjects import ASSIGN

log = logs.get("assignments")


class Assignments:
    """Publishes ASSIGN to the workers that a row names and to those that it named before."""

    def __init__(self, bus: Bus, database: Database, playheads: Playheads) -> None:
        self._bus, self._database, self._playheads = bus, database, playheads

    async def notify(self, record: SessionRecord, *named: str | None) -> None:
        """Send `record` to its workers and to `named`, unless its fence is not in the log. Never raises.

        A worker that misses the message gets the row with its next renewal.
        """
        if record.own_revision is None:
            return
        heard = self._playheads.apply_to(record)
        incoming, key = (None, None) if record.target is None else await self._migration(heard)
        for worker in dict.fromkeys((record.worker, *named)):
            if worker in (None, record.target):
                continue
            its_key = key if worker == record.worker else None
            await self._send(str(worker), Assignment(record=heard, key=its_key))
        if record.target is not None:
            await self._send(record.target, Assignment(record=heard, incoming=incoming, key=key))

    async def notify_of_loss(self, record: SessionRecord) -> None:
        """Send `record`, whose fence the log has lost, to its owner without a fence. Never raises.

        A new log may have the fence at the sequence of the lost one, so the row that follows may look as if
        nothing had changed. If that row arrives first, the worker ignores this one.
        """
        if record.worker is not None:
            lost = self._playheads.apply_to(record).model_copy(update={"own_revision": None})
            await self._send(record.worker, Assignment(record=lost))

    async def _migration(self, record: SessionRecord) -> tuple[Incoming | None, MigrationKey | None]:
        """Return what the two workers of a migration need besides the row."""
        try:
            async with self._database.statement() as db:
                source = await db.workers.get(str(record.worker))
                keys = await db.sessions.migration_keys(str(record.worker), record.id)
        except TurboServeError as error:
            log.debug("source of a migration not read", session=record.id, error=error.detail)
            return None, None
        key = next((key for key in keys if key.migration == record.migration), None)
        return Incoming(record=record, source=() if source is None else source.transfer), key

    async def _send(self, worker: str, message: Assignment) -> None:
        try:
            await self._bus.publish(ASSIGN, worker, message)
        except (nats.errors.Error, OSError) as error:
            log.debug("assignment not sent", worker=worker, error=repr(error))
