"""Endpoints of sessions: `service/sessions.py`."""

from __future__ import annotations

from turboserve.bench.simulate.store.database import Row
from turboserve.bench.simulate.store.hot import Latents
from turboserve.bench.simulate.store.rows import RETRY_S, Rows
from turboserve.contracts import requests
from turboserve.contracts.errors import ConflictError, NotFoundError
from turboserve.contracts.sessions import PromptReceipt, SessionRecord
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core.change import Change

IDLE_GUARD_S = 1.0


class Sessions:
    """By users, and by services about one session."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    async def get(self, ref: requests.SessionRef) -> SessionRecord:
        await self._rows.pause()
        record = self._rows.database.transaction(lambda: self._rows.row(ref.session).record)
        return self._rows.playheads.onto(record, self._rows.now)

    async def list_sessions(self, _: requests.ListSessions) -> tuple[SessionRecord, ...]:
        await self._rows.pause()
        rows = self._rows.database.transaction(
            lambda: [r for r in self._rows.database.rows() if not r.phase.ended]
        )
        return tuple(self._rows.playheads.onto(record, self._rows.now) for record in rows)

    async def get_latents(self, request: requests.GetLatents) -> Latents:
        await self._rows.pause()
        kept = self._rows.hot.latents.get(request.session, {}).get(request.index)
        if kept is None:
            raise NotFoundError(f"the latents of chunk {request.index} are not kept", field="index")
        return kept

    async def create(self, request: requests.CreateSession) -> SessionRecord:
        change = rules.create(request, self._rows.now)
        await self._rows.pause()

        def work() -> SessionRecord | None:
            existing = self._rows.database.sessions.get(request.id)
            if existing is not None:
                if existing.request != request:
                    raise ConflictError(f"the session id {request.id} is taken", field="id")
                return existing.record
            self._rows.room(request.model).admit(RETRY_S)
            self._rows.database.insert_row(change.record, request)
            self._rows.tell(change)
            return None

        existing = self._rows.database.transaction(work)
        return existing if existing is not None else self._rows.aftermath.changed(change.record)

    async def submit_prompt(self, request: requests.SubmitPrompt) -> PromptReceipt:
        await self._rows.pause()

        def work() -> tuple[Change | None, PromptReceipt]:
            record = self._rows.row(request.session).record
            first = self._rows.database.controls.get(request.event_id)
            if first is not None:
                return None, first[0]
            change, receipt = rules.submit_prompt(record, request, self._rows.now)
            self._rows.write(change)
            self._rows.database.controls.put(request.event_id, (receipt, None))
            return change, receipt

        change, receipt = self._rows.database.transaction(work)
        if change is not None:
            self._rows.aftermath.changed(change.record)
        return receipt

    async def pause(self, ref: requests.SessionRef) -> SessionRecord:
        return await self._rows.change(ref.session, lambda record: rules.pause(record, self._rows.now))

    async def resume(self, ref: requests.SessionRef) -> SessionRecord:
        def rule(record: SessionRecord) -> Change | None:
            change = rules.resume(record, self._rows.now)
            if change is not None:
                self._rows.room(record.model).admit(RETRY_S)
            return change

        return await self._rows.change(ref.session, rule)

    async def end(self, request: requests.EndSession) -> SessionRecord:
        return await self._rows.end(
            request.session, lambda record: rules.end(record, request.reason, self._rows.now)
        )

    async def fail(self, request: requests.FailSession) -> SessionRecord:
        return await self._rows.end(
            request.session, lambda record: rules.fail(record, request, self._rows.now)
        )

    async def suspend_idle(self, request: requests.SuspendIdle) -> SessionRecord:
        watched_s = self._rows.playheads.watched_s(request.session, self._rows.now)
        if watched_s is not None and watched_s < IDLE_GUARD_S:
            raise ConflictError(f"session {request.session} was watched {watched_s:.1f} s ago")
        return await self._rows.change(
            request.session,
            lambda record: rules.suspend_idle(record, request, self._rows.now),
            request.term,
        )

    async def note(self, request: requests.NoteDecision) -> requests.Done:
        await self._rows.pause()

        def work() -> None:
            self._rows.in_term(request.term)
            database = self._rows.database
            database.decided(request.decision, -len(database.decisions) - 1)

        self._rows.database.transaction(work, durable=False)
        return requests.Done()

    async def place(self, request: requests.PlaceSession) -> SessionRecord:
        await self._rows.pause()

        def work() -> tuple[Row, Change | None]:
            self._rows.in_term(request.term)
            worker = self._rows.database.workers.get(request.worker)
            row = self._rows.row(request.session)
            if row.record.version != request.expected_version and self._rows.placed(row.record, request):
                return row, None
            slots = self._rows.slots(request.worker, worker, row.record.id)
            change = rules.place(row.record, request, slots, self._rows.now, RETRY_S)
            self._rows.write(change)
            return row, change

        row, change = self._rows.database.transaction(work)
        if change is None:
            return self._rows.playheads.onto(row.record, self._rows.now)
        before = row.record
        return await self._rows.aftermath.owned_anew(
            change.record, row.fence_revision, before.worker, before.target
        )
