"""Migrations between workers. Each step is one transaction: the target's row first, then the session's."""

from __future__ import annotations

from cachetools import LRUCache

from turboserve.clock import Clock
from turboserve.contracts.requests import AbandonMigration, BeginMigration, CommitMigration, SessionRef
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.ids import random_token
from turboserve.state_store import metrics
from turboserve.state_store.core import session_migrations as rules
from turboserve.state_store.core.change import traced
from turboserve.state_store.core.workers import gone
from turboserve.state_store.ports.database import Database
from turboserve.state_store.service.transactions import PostCommit, fenced, locked
from turboserve.state_store.service.worker_slots import lock_placement, slots_of
from turboserve.state_store.settings import Settings
from turboserve.telemetry import traceparent
from turboserve.telemetry_names import MIGRATION_STEP

KEY_BYTES = 32
REMEMBERED = 10_000
"""Migrations whose begin is remembered, to measure them at their end."""


class SessionMigrations:
    """The endpoints of migrations, without their transport. All may raise UnavailableError."""

    def __init__(self, database: Database, post_commit: PostCommit, clock: Clock, settings: Settings) -> None:
        self._database, self._post_commit = database, post_commit
        self._clock, self._settings = clock, settings
        self._begun: LRUCache[tuple[str, int | None], float] = LRUCache(REMEMBERED)
        """(session, migration) → monotonic time of its begin at this instance."""

    async def begin(self, request: BeginMigration) -> SessionRecord:
        async with self._database.transaction() as db:
            target, row = await lock_placement(db, request, request.target)
            record = row.record
            if rules.began(record, request):
                return await self._post_commit.fresh(record)
            if target is None:
                raise gone(request.target)
            slots = await slots_of(db, target, record, target.capacity)
            change = rules.begin(record, request, slots, self._clock.wall(), self._settings.admission_retry_s)
            change = traced(change, "migration_traceparent", traceparent())
            await db.changes.write(change, migration_key=random_token(KEY_BYTES))
        metrics.migrations.add(1, {MIGRATION_STEP: "begin"})
        self._begun[change.record.id, change.record.migration] = self._clock.monotonic()
        return await self._post_commit.changed(change.record)

    async def commit(self, request: CommitMigration) -> SessionRecord:
        async with self._database.transaction() as db:
            target, row = await lock_placement(db, request, request.target)
            record = row.record
            if await db.controls.migrated(record, request.migration):
                return await self._post_commit.fresh(record)
            change = traced(rules.commit(record, request, self._clock.wall()), "traceparent", traceparent())
            if target is None or target.phase is WorkerPhase.GONE:
                raise gone(request.target)
            await db.changes.write(change)
        self._ended(request, "commit")
        return await self._post_commit.owner_changed(change.record, row.fence_revision, record.worker)

    async def abandon(self, request: AbandonMigration) -> SessionRecord:
        async with self._database.transaction() as db:
            await fenced(db, request)
            row = await locked(db, SessionRef(session=request.session))
            record = row.record
            now = self._clock.wall()
            change = rules.abandon(record, request.migration, request.reason, now, release=request.release)
            if change is None:
                return await self._post_commit.fresh(record)
            await db.changes.write(change)
        self._ended(request, "abandon")
        if change.record.epoch != record.epoch:
            named = (record.worker, record.target)
            return await self._post_commit.owner_changed(change.record, row.fence_revision, *named)
        return await self._post_commit.changed(change.record, record.target)

    def _ended(self, request: CommitMigration | AbandonMigration, step: str) -> None:
        metrics.migrations.add(1, {MIGRATION_STEP: step})
        begun = self._begun.pop((request.session, request.migration), None)
        if begun is not None:
            metrics.migration_duration.record(self._clock.monotonic() - begun, {MIGRATION_STEP: step})
