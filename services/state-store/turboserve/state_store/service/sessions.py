"""Sessions: each request is one transaction on one row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from turboserve.clock import Clock
from turboserve.contracts.chunks import LatentsHeader
from turboserve.contracts.errors import ConflictError, InvalidInputError, NoCapacityError
from turboserve.contracts.leading import TermFenced
from turboserve.contracts.requests import (
    ChangeSession,
    CreateSession,
    DecisionPage,
    Done,
    EndSession,
    FailSession,
    GetLatents,
    ListSessions,
    NoteDecision,
    PlaceSession,
    ReleaseSession,
    SessionPage,
    SessionRef,
    SuspendIdle,
)
from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store.core import recordings
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core.change import Change, traced, with_field
from turboserve.state_store.core.controls import check_initial
from turboserve.state_store.core.workers import gone
from turboserve.state_store.hot.session_state import Latents, Playheads
from turboserve.state_store.ports.database import Database, UnitOfWork
from turboserve.state_store.ports.records import LogProgress
from turboserve.state_store.publish.canaries import LogStatus
from turboserve.state_store.service.admission import Admission
from turboserve.state_store.service.controls import declared_controls
from turboserve.state_store.service.transactions import PostCommit, fenced, locked, visible
from turboserve.state_store.service.worker_slots import lock_placement, slots_of
from turboserve.state_store.settings import Settings
from turboserve.telemetry import traceparent

DECISIONS = 200
"""Maximum number of a session's newest decisions that are listed."""
PAGE_BYTES = 500_000
"""Maximum size of a page, so that it fits into one message with any broker's settings."""


class Sessions:
    """The endpoints of sessions, without their transport. All may raise UnavailableError."""

    def __init__(
        self,
        database: Database,
        post_commit: PostCommit,
        playheads: Playheads,
        latents: Latents,
        log: LogStatus,
        clock: Clock,
        settings: Settings,
        found_full: Callable[[str], None] | None = None,
    ) -> None:
        """`found_full`: see `Admission`."""
        self._database, self._post_commit = database, post_commit
        self._admission = Admission(log, clock, settings, found_full)
        self._playheads, self._latents = playheads, latents
        self._clock, self._settings = clock, settings

    # Reading

    async def get(self, ref: SessionRef) -> SessionRecord:
        async with self._database.statement() as db:
            record = visible(await db.sessions.get(ref.session), ref)
        return await self._post_commit.fresh(record)

    async def list(self, request: ListSessions) -> SessionPage:
        before = _cursor(request.after)
        async with self._database.statement() as db:
            rows = await db.sessions.page(request, before)
        kept: list[tuple[int, SessionRecord]] = []
        size = 0
        for number, record in rows[: request.limit]:
            size += len(record.to_bytes())
            if kept and size > PAGE_BYTES:
                break
            kept.append((number, record))
        more = len(kept) < len(rows)
        records = await self._playheads.onto(record for _, record in kept)
        return SessionPage(sessions=tuple(records), next=str(kept[-1][0]) if more and kept else None)

    async def decisions(self, ref: SessionRef) -> DecisionPage:
        async with self._database.transaction() as db:
            visible(await db.sessions.get(ref.session), ref)
            return DecisionPage(decisions=tuple(await db.controls.decisions_of(ref.session, DECISIONS)))

    async def latents(self, request: GetLatents) -> tuple[LatentsHeader, bytes]:
        """Return latents to the session's owner. Raises ForbiddenError to others, and as `Latents.get`."""
        async with self._database.statement() as db:
            record = visible(await db.sessions.get(request.session), SessionRef(session=request.session))
        rules.check_owner(record, request.worker)
        return await self._latents.get(request)

    # Requests of users

    async def create(self, request: CreateSession) -> SessionRecord:
        change = traced(rules.create(request, self._clock.wall()), "traceparent", traceparent())
        async with self._database.transaction(admits=True) as db:
            census = await self._admission.census(
                db, request.id, request.model, request.tenant, locks_tenant=True
            )
            if census.taken:
                existing = await db.sessions.get(request.id)
                if existing is None or not await db.sessions.created_by(request):
                    raise ConflictError(f"the session id {request.id} is taken", field="id")
                return existing
            admitted = await self._admission.create(db, request, census)
            if admitted.refusal is None:
                if request.controls:
                    declared = await declared_controls(db, change.record)
                    if declared is None:
                        raise NoCapacityError(
                            f"which controls {request.model} has is not known before its first worker",
                            field="controls",
                            retry_after_s=self._settings.admission_retry_s,
                        )
                    check_initial(request.controls, declared, request.model)
                change = with_field(change, "weight", admitted.weight)
                await db.changes.create(change, admitted.tenant)
                if request.recording is not None:
                    await self._record(db, request.recording, change.record)
        if admitted.refusal is not None:
            raise admitted.refusal
        created = await self._post_commit.changed(change.record)
        return created.model_copy(update={"rates": admitted.rates})

    async def _record(self, db: UnitOfWork, recording: str, record: SessionRecord) -> None:
        stored = await db.recordings.stored_bytes(record.tenant)
        limit_bytes = self._settings.tenant_recorded_bytes
        await db.recordings.insert(
            recordings.started(recording, record, stored, limit_bytes, self._clock.wall())
        )

    async def pause(self, ref: SessionRef) -> SessionRecord:
        return await self._changed(ref, rules.pause)

    async def change(self, request: ChangeSession) -> SessionRecord:
        # The event is as long as that of a pause.
        return await self._changed(request, lambda record, now: rules.change(record, request, now))

    async def _changed(
        self, ref: SessionRef, decide: Callable[[SessionRecord, float], Change | None]
    ) -> SessionRecord:
        """Apply what `decide` returns for the locked row; None: nothing changes."""
        async with self._database.transaction() as db:
            record = (await locked(db, ref)).record
            change = decide(record, self._clock.wall())
            if change is not None:
                await db.changes.write(change, tenant=await self._admission.pause(db, record))
        if change is None:
            return await self._post_commit.fresh(record)
        return await self._post_commit.changed(change.record, record.target)

    async def resume(self, ref: SessionRef) -> SessionRecord:
        async with self._database.transaction(admits=True) as db:
            record = (await locked(db, ref)).record
            change = rules.resume(record, self._clock.wall())
            if change is not None:
                change = traced(change, "traceparent", traceparent())
                change = with_field(change, "weight", await self._admission.resume(db, record))
                await db.changes.write(change)
        if change is None:
            return await self._post_commit.fresh(record)
        return await self._post_commit.changed(change.record)

    async def end(self, request: EndSession) -> SessionRecord:
        return await self._end(request, lambda record: rules.end(record, request.reason, self._clock.wall()))

    # Retention

    async def abandon(self, row: SessionRecord, reason: str) -> SessionRecord:
        """End the session unless the row has changed since it was read."""
        rule = partial(rules.abandon, version=row.version, reason=reason, now=self._clock.wall())
        return await self._end(SessionRef(session=row.id), rule)

    # Requests of services

    async def fail(self, request: FailSession) -> SessionRecord:
        ref = SessionRef(session=request.session)
        record = await self._end(ref, lambda record: rules.fail(record, request, self._clock.wall()))
        # A repetition is answered after the row has lost its owner, to any worker: without the user's values.
        return record.model_copy(update={"prompt": "", "metadata": {}, "controls": {}})

    async def suspend_idle(self, request: SuspendIdle) -> SessionRecord:
        ref = SessionRef(session=request.session)
        watched_s = await self._playheads.watched_s(request.session)
        if watched_s is not None and watched_s < self._settings.idle_guard_s:
            raise ConflictError(
                f"session {request.session} was watched {watched_s:.1f} s ago",
                field="session",
                limit=self._settings.idle_guard_s,
            )
        return await self._change(
            ref, lambda row: rules.suspend_idle(row, request, self._clock.wall()), led=request
        )

    async def release(self, request: ReleaseSession) -> SessionRecord:
        async with self._database.transaction() as db:
            await fenced(db, request)
            row = await locked(db, SessionRef(session=request.session))
            change = rules.release(row.record, request, self._clock.wall())
            if change is not None:
                await db.changes.write(change)
        if change is None:
            return await self._post_commit.fresh(row.record)
        named = (row.record.worker, row.record.target)
        return await self._post_commit.owner_changed(change.record, row.fence_revision, *named)

    async def note(self, request: NoteDecision) -> Done:
        decision = request.decision.model_copy(update={"at": self._clock.wall()})
        async with self._database.transaction(durable=False) as db:
            await fenced(db, request)
            await locked(db, SessionRef(session=decision.session))
            await db.controls.note(decision)
        return Done()

    async def place(self, request: PlaceSession) -> SessionRecord:
        async with self._database.transaction() as db:
            worker, row = await lock_placement(db, request, request.worker)
            record = row.record
            if record.version != request.expected_version and await db.controls.decided(
                record, request.expected_version + 1, request.worker
            ):
                return await self._post_commit.fresh(record)
            if worker is None:
                raise gone(request.worker)
            # The scheduler decides when a worker holds more than K sessions; the row, how many fit at all.
            slots = await slots_of(db, worker, record, worker.most_sessions)
            change = rules.place(record, request, slots, self._clock.wall(), self._settings.admission_retry_s)
            change = traced(change, "traceparent", traceparent())
            await db.changes.write(change)
        return await self._post_commit.owner_changed(
            change.record, row.fence_revision, record.worker, record.target
        )

    # Shared helpers

    async def _change(
        self, ref: SessionRef, rule: Callable[[SessionRecord], Change | None], led: TermFenced | None = None
    ) -> SessionRecord:
        async with self._database.transaction() as db:
            if led is not None:
                await fenced(db, led)
            record = (await locked(db, ref)).record
            change = rule(record)
            if change is not None:
                await db.changes.write(change)
        if change is None:
            return await self._post_commit.fresh(record)
        return await self._post_commit.changed(change.record, record.target)

    async def _end(self, ref: SessionRef, rule: Callable[[SessionRecord], Change | None]) -> SessionRecord:
        last_s = await self._playheads.newest(ref.session)
        async with self._database.transaction() as db:
            row = await locked(db, ref)
            change = rule(record := row.record)
            if change is not None:
                await db.changes.write(change)
                # Playheads are stored with counted chunks, and no chunk follows.
                await db.progress.count([LogProgress(record.id, 0, 0, last_s)])
        if change is None:
            return record
        await self._latents.forget(record.id)
        await self._playheads.forget(record.id)
        named = record.worker, record.target
        return await self._post_commit.owner_changed(change.record, row.fence_revision, *named)


def _cursor(after: str | None) -> int | None:
    if after is None:
        return None
    if not (after.isascii() and after.isdigit() and len(after) < 19):
        raise InvalidInputError("after: not a page's `next`", field="after")
    return int(after)
