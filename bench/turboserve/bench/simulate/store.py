"""The state store: its core's functions in transactions on the in-memory tables, step by step.

The shell in small: `service/sessions.py`, `service/moves.py`, `service/workers.py`. No decision is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turboserve import subjects
from turboserve.bench.simulate.database import Database, Row
from turboserve.bench.simulate.fence import Aftermath
from turboserve.bench.simulate.hot import HotStore, Latents, Playheads
from turboserve.bench.simulate.kernel import Program, sleep
from turboserve.bench.simulate.log import Stream
from turboserve.bench.simulate.network import Handler, Network
from turboserve.contracts import requests
from turboserve.contracts.errors import ConflictError, NotFoundError, SessionNotFoundError
from turboserve.contracts.events import Event
from turboserve.contracts.sessions import PromptReceipt, SessionRecord
from turboserve.contracts.workers import Assignment, Incoming, Renewal, WorkerPhase, WorkerRecord
from turboserve.state_store.core import moves as move_rules
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core import workers as worker_rules
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.workers import Room, Slots, gone
from turboserve.subjects import EVENT, WORKER_EVENT

RETRY_S = 1.0
IDLE_GUARD_S = 1.0
STATEMENT_S = 0.002
"""Mean time that a transaction takes before it commits."""


class Store:
    """The state store's process; its databases are not its own and survive it."""

    def __init__(
        self,
        program: Program,
        network: Network,
        database: Database,
        hot: HotStore,
        chunks: Stream,
        events: Stream,
        assign: Callable[[str, Assignment], None],
        worker_timeout_s: float,
    ) -> None:
        self.program, self.database, self.hot = program, database, hot
        self._chunks, self._events, self._assign = chunks, events, assign
        self._worker_timeout_s = worker_timeout_s
        self._kernel = program.kernel
        self.playheads = Playheads()
        self._handlers: dict[str, Handler] = {
            subjects.CREATE_SESSION.subject: self.create,
            subjects.GET_SESSION.subject: self.get,
            subjects.LIST_SESSIONS.subject: self.list_sessions,
            subjects.SUBMIT_PROMPT.subject: self.submit_prompt,
            subjects.PAUSE_SESSION.subject: self.pause,
            subjects.RESUME_SESSION.subject: self.resume,
            subjects.END_SESSION.subject: self.end,
            subjects.FAIL_SESSION.subject: self.fail,
            subjects.PLACE_SESSION.subject: self.place,
            subjects.BEGIN_MOVE.subject: self.begin_move,
            subjects.COMMIT_MOVE.subject: self.commit_move,
            subjects.ABANDON_MOVE.subject: self.abandon_move,
            subjects.NOTE_DECISION.subject: self.note,
            subjects.SUSPEND_IDLE.subject: self.suspend_idle,
            subjects.RENEW.subject: self.renew,
            subjects.WORKER_GONE.subject: self.gone,
            subjects.DRAIN_WORKER.subject: self.drain,
            subjects.LIST_WORKERS.subject: self.list_workers,
            subjects.GET_LATENTS.subject: self.get_latents,
        }
        network.serve("state-store", program, self._handlers.__getitem__)

    def boot(self) -> None:
        """A new life: what it had in memory is gone."""
        self.playheads = Playheads()
        self.aftermath = Aftermath(
            self.program, self.database, self._chunks, self._events, self.playheads, self._assign
        )
        self.aftermath.start()

    @property
    def _now(self) -> float:
        return self._kernel.now

    def _pause(self) -> float:
        return self._kernel.random.expovariate(1.0 / STATEMENT_S)

    # Hints

    def playhead(self, session: str, playhead_s: float, viewers: int) -> None:
        self.playheads.report(session, playhead_s, viewers, self._now)

    def latents(self, session: str, latents: Latents) -> None:
        self.hot.keep(session, latents)

    # Reading

    async def get(self, ref: requests.SessionRef) -> SessionRecord:
        await sleep(self._pause())
        record = self.database.transaction(lambda: self._row(ref.session).record)
        return self.playheads.onto(record, self._now)

    async def list_sessions(self, _: requests.ListSessions) -> tuple[SessionRecord, ...]:
        await sleep(self._pause())
        rows = self.database.transaction(lambda: [r for r in self.database.rows() if not r.phase.ended])
        return tuple(self.playheads.onto(record, self._now) for record in rows)

    async def list_workers(self, _: requests.ListWorkers) -> tuple[WorkerRecord, ...]:
        await sleep(self._pause())
        return tuple(self.database.transaction(self.database.living))

    async def get_latents(self, request: requests.GetLatents) -> Latents:
        await sleep(self._pause())
        kept = self.hot.latents.get(request.session, {}).get(request.index)
        if kept is None:
            raise NotFoundError(f"the latents of chunk {request.index} are not kept", field="index")
        return kept

    # By users

    async def create(self, request: requests.CreateSession) -> SessionRecord:
        change = rules.create(request, self._now)
        await sleep(self._pause())

        def work() -> SessionRecord | None:
            existing = self.database.sessions.get(request.id)
            if existing is not None:
                if existing.request != request:
                    raise ConflictError(f"the session id {request.id} is taken", field="id")
                return existing.record
            self._room(request.model).admit(RETRY_S)
            self.database.insert_row(change.record, request)
            self._tell(change)
            return None

        existing = self.database.transaction(work)
        return existing if existing is not None else self.aftermath.changed(change.record)

    async def submit_prompt(self, request: requests.SubmitPrompt) -> PromptReceipt:
        await sleep(self._pause())

        def work() -> tuple[Change | None, PromptReceipt]:
            record = self._row(request.session).record
            first = self.database.controls.get(request.event_id)
            if first is not None:
                return None, first[0]
            change, receipt = rules.submit_prompt(record, request, self._now)
            self._write(change)
            self.database.controls.put(request.event_id, (receipt, None))
            return change, receipt

        change, receipt = self.database.transaction(work)
        if change is not None:
            self.aftermath.changed(change.record)
        return receipt

    async def pause(self, ref: requests.SessionRef) -> SessionRecord:
        return await self._change(ref.session, lambda record: rules.pause(record, self._now))

    async def resume(self, ref: requests.SessionRef) -> SessionRecord:
        def rule(record: SessionRecord) -> Change | None:
            change = rules.resume(record, self._now)
            if change is not None:
                self._room(record.model).admit(RETRY_S)
            return change

        return await self._change(ref.session, rule)

    async def end(self, request: requests.EndSession) -> SessionRecord:
        return await self._end(request.session, lambda record: rules.end(record, request.reason, self._now))

    # By services

    async def fail(self, request: requests.FailSession) -> SessionRecord:
        return await self._end(request.session, lambda record: rules.fail(record, request, self._now))

    async def suspend_idle(self, request: requests.SuspendIdle) -> SessionRecord:
        watched_s = self.playheads.watched_s(request.session, self._now)
        if watched_s is not None and watched_s < IDLE_GUARD_S:
            raise ConflictError(f"session {request.session} was watched {watched_s:.1f} s ago")
        return await self._change(
                request.session, lambda record: rules.suspend_idle(record, request, self._now)
            )

    async def note(self, request: requests.NoteDecision) -> requests.Done:
        await sleep(self._pause())
        version = -len(self.database.decisions) - 1
        self.database.transaction(
            lambda: self.database.decided(request.decision, version), durable=False
        )
        return requests.Done()

    async def place(self, request: requests.PlaceSession) -> SessionRecord:
        await sleep(self._pause())

        def work() -> tuple[Row, Change | None]:
            worker = self.database.workers.get(request.worker)
            row = self._row(request.session)
            if row.record.version != request.expected_version and self._placed(row.record, request):
                return row, None
            slots = self._slots(request.worker, worker, row.record.id)
            change = rules.place(row.record, request, slots, self._now, RETRY_S)
            self._write(change)
            return row, change

        row, change = self.database.transaction(work)
        if change is None:
            return self.playheads.onto(row.record, self._now)
        before = row.record
        return await self.aftermath.owned_anew(
                change.record, row.fence_revision, before.worker, before.target
            )

    async def begin_move(self, request: requests.BeginMove) -> SessionRecord:
        await sleep(self._pause())

        def work() -> tuple[SessionRecord, bool]:
            target = self.database.workers.get(request.target)
            record = self._row(request.session).record
            if move_rules.began(record, request):
                return record, False
            slots = self._slots(request.target, target, record.id)
            change = move_rules.begin(record, request, slots, self._now, RETRY_S)
            self._write(change)
            return change.record, True

        record, changed = self.database.transaction(work)
        return self.aftermath.changed(record) if changed else self.playheads.onto(record, self._now)

    async def commit_move(self, request: requests.CommitMove) -> SessionRecord:
        await sleep(self._pause())

        def work() -> tuple[Row, Change | None]:
            target = self.database.workers.get(request.target)
            row = self._row(request.session)
            if self._moved(row.record, request.move):
                return row, None
            change = move_rules.commit(row.record, request, self._now)
            if target is None or target.phase is WorkerPhase.GONE:
                raise gone(request.target)
            self._write(change)
            return row, change

        row, change = self.database.transaction(work)
        if change is None:
            return self.playheads.onto(row.record, self._now)
        return await self.aftermath.owned_anew(change.record, row.fence_revision, row.record.worker)

    async def abandon_move(self, request: requests.AbandonMove) -> SessionRecord:
        return await self._change(
            request.session,
            lambda record: move_rules.abandon(record, request.move, request.reason, self._now),
        )

    # Workers

    async def renew(self, request: requests.Renew) -> Renewal:
        load = request.load
        held = {one.session for one in load.sessions} | {one.session for one in load.moves}
        await sleep(self._pause())
        if load.phase is WorkerPhase.GONE:
            await self.gone(requests.WorkerGone(worker=load.worker, reason="it left"))
            return Renewal(worker=load.worker, drain=True)
        now = self._now

        def work() -> tuple[bool, WorkerRecord, list[SessionRecord], list[Incoming]]:
            before = self.database.workers.get(load.worker)
            record = worker_rules.renewed(before, load, now)
            self.database.workers.put(record.id, record)
            if before is None:
                self.database.make_durable()
                self._tell_of_worker(worker_rules.joined_event(record, now), record.id)
            mine = [
                row
                for row in self.database.rows()
                if row.worker == record.id
                and not row.phase.ended
                and (row.phase.value != "suspended" or row.id in held)
            ]
            return before is None, record, mine, self._moving_to(record.id)

        joined, record, mine, coming = self.database.transaction(work, durable=False)
        if joined:
            self.aftermath.wake()
        told: list[SessionRecord] = []
        for row in mine:
            if row.own_revision is None and row.epoch > 0:
                row = await self.aftermath.fenced(row, None)
            if row.worker == load.worker and (row.own_revision is not None or row.id in held):
                told.append(self.playheads.heard(row))
        return Renewal(
            worker=load.worker,
            assigned=tuple(told),
            incoming=tuple(coming),
            drain=record.phase is WorkerPhase.DRAINING,
        )

    async def gone(self, request: requests.WorkerGone) -> requests.Done:
        await sleep(self._pause())
        now = self._now
        stayed: list[SessionRecord] = []

        def work() -> None:
            record = self.database.workers.get(request.worker)
            after = None if record is None else worker_rules.left(record, request.reason)
            if after is None:
                return
            self.database.workers.put(after.id, after)
            self._tell_of_worker(worker_rules.left_event(after, now), after.id)
            for one in self._moving_to(after.id):
                change = move_rules.abandon(
                    one.record, one.record.move or 0, f"{after.id} is gone", now
                )
                if change is not None:
                    self._write(change)
                    stayed.append(change.record)

        self.database.transaction(work)
        self.aftermath.wake()
        for record in stayed:
            self.aftermath.changed(record)
        return requests.Done()

    async def drain(self, request: requests.DrainWorker) -> requests.Done:
        await sleep(self._pause())

        def work() -> None:
            record = self.database.workers.get(request.worker)
            if record is None:
                raise NotFoundError(f"there is no worker {request.worker}", field="worker")
            after = worker_rules.draining(record)
            if after is not None:
                self.database.workers.put(after.id, after)

        self.database.transaction(work)
        return requests.Done()

    # What they share

    async def _change(self, session: str, rule: Callable[[SessionRecord], Change | None]) -> SessionRecord:
        await sleep(self._pause())

        def work() -> tuple[SessionRecord, Change | None]:
            record = self._row(session).record
            change = rule(record)
            if change is not None:
                self._write(change)
            return record, change

        record, change = self.database.transaction(work)
        if change is None:
            return self.playheads.onto(record, self._now)
        return self.aftermath.changed(change.record, record.target)

    async def _end(self, session: str, rule: Callable[[SessionRecord], Change | None]) -> SessionRecord:
        await sleep(self._pause())

        def work() -> tuple[Row, Change | None]:
            row = self._row(session)
            change = rule(row.record)
            if change is not None:
                self._write(change)
            return row, change

        row, change = self.database.transaction(work)
        if change is None:
            return row.record
        self.hot.forget(session)
        self.playheads.forget(session)
        before = row.record
        return await self.aftermath.owned_anew(
                change.record, row.fence_revision, before.worker, before.target
            )

    def _row(self, session: str) -> Row:
        row = self.database.sessions.get(session)
        if row is None:
            raise SessionNotFoundError(f"there is no session {session}", field="session")
        return row

    def _slots(self, name: str, worker: WorkerRecord | None, besides: str) -> Slots:
        if worker is None:
            raise gone(name)
        return Slots(
            worker.model, worker.phase, worker.capacity, self.database.slots_used(name, besides)
        )

    def _room(self, model: str) -> Room:
        after = self._now - self._worker_timeout_s
        capacity = sum(
            worker.capacity
            for worker in self.database.workers.values()
            if worker.phase in (WorkerPhase.STARTING, WorkerPhase.READY) and worker.renewed_at > after
        )
        demand = sum(
            record.phase.holds_slot
            or record.phase.value == "requested"
            or (record.phase.value == "suspended" and record.activity.value == "watching")
            for record in self.database.rows()
        )
        return Room(model, len(self.database.workers) > 0, capacity, demand)

    def _placed(self, record: SessionRecord, request: requests.PlaceSession) -> bool:
        decision = self.database.decisions.get((record.id, request.expected_version + 1))
        return (
            decision is not None and decision.epoch == record.epoch and decision.worker == request.worker
        )

    def _moved(self, record: SessionRecord, move: int) -> bool:
        return any(
            decision.kind == "moved" and decision.epoch == record.epoch
            for (session, _), decision in self.database.decisions.items()
            if session == record.id and decision.numbers.get("move") == move
        )

    def _moving_to(self, worker: str) -> list[Incoming]:
        return [
            self.aftermath.incoming(record)
            for record in self.database.rows()
            if record.target == worker and not record.phase.ended
        ]

    def _write(self, change: Change) -> None:
        self.database.write_row(change.record)
        if change.decision is not None:
            self.database.decided(change.decision, change.record.version)
        self._tell(change)

    def _tell(self, change: Change) -> None:
        for event in change.events:
            self.database.tell(event, EVENT.of(change.record.id))

    def _tell_of_worker(self, event: Event, worker: str) -> None:
        self.database.tell(event, WORKER_EVENT.of(worker))


def served(request: Any) -> str:
    """One line about a request, for the trace."""
    return " ".join(f"{name}={value}" for name, value in request if name in ("session", "worker", "target", "move"))
