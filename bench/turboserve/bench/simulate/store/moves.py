"""Endpoints of moves: `service/moves.py`."""

from __future__ import annotations

from turboserve.bench.simulate.store.database import Row
from turboserve.bench.simulate.store.rows import RETRY_S, Rows
from turboserve.contracts import requests
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.state_store.core import moves as rules
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.workers import gone


class Moves:
    """Each step is one transaction."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    async def begin(self, request: requests.BeginMove) -> SessionRecord:
        await self._rows.pause()

        def work() -> tuple[SessionRecord, bool]:
            self._rows.in_term(request.term)
            target = self._rows.database.workers.get(request.target)
            record = self._rows.row(request.session).record
            if rules.began(record, request):
                return record, False
            slots = self._rows.slots(request.target, target, record.id)
            change = rules.begin(record, request, slots, self._rows.now, RETRY_S)
            self._rows.write(change)
            return change.record, True

        record, changed = self._rows.database.transaction(work)
        return (
            self._rows.aftermath.changed(record)
            if changed
            else self._rows.playheads.onto(record, self._rows.now)
        )

    async def commit(self, request: requests.CommitMove) -> SessionRecord:
        await self._rows.pause()

        def work() -> tuple[Row, Change | None]:
            self._rows.in_term(request.term)
            target = self._rows.database.workers.get(request.target)
            row = self._rows.row(request.session)
            if self._rows.moved(row.record, request.move):
                return row, None
            change = rules.commit(row.record, request, self._rows.now)
            if target is None or target.phase is WorkerPhase.GONE:
                raise gone(request.target)
            self._rows.write(change)
            return row, change

        row, change = self._rows.database.transaction(work)
        if change is None:
            return self._rows.playheads.onto(row.record, self._rows.now)
        return await self._rows.aftermath.owned_anew(change.record, row.fence_revision, row.record.worker)

    async def abandon(self, request: requests.AbandonMove) -> SessionRecord:
        await self._rows.pause()

        def work() -> tuple[Row, Change | None]:
            self._rows.in_term(request.term)
            row = self._rows.row(request.session)
            reason, now = request.reason, self._rows.now
            change = rules.abandon(row.record, request.move, reason, now, release=request.release)
            if change is not None:
                self._rows.write(change)
            return row, change

        row, change = self._rows.database.transaction(work)
        before = row.record
        if change is None:
            return self._rows.playheads.onto(before, self._rows.now)
        if change.record.epoch == before.epoch:
            return self._rows.aftermath.changed(change.record, before.target)
        named = (before.worker, before.target)
        return await self._rows.aftermath.owned_anew(change.record, row.fence_revision, *named)
