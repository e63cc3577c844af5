"""The workers and sessions that placement decides on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from turboserve.scheduler.placement.pool import NO_WORKER, Pool, PoolEntry
from turboserve.scheduler.placement.types import Candidate, SessionState, WorkerState, class_counts
from turboserve.scheduler.placement.urgency import ReportedSlack, Urgency
from turboserve.static_frozen import with_fields

PoolKey = tuple[str, str | None]
"""Model and digest of the weights."""


class Cluster:
    """All workers and sessions. A put replaces the entry with the same id.

    A change takes time logarithmic in the number of workers. A session may name unknown workers; its slots
    there count as soon as the worker is put.
    """

    def __init__(
        self,
        workers: Iterable[WorkerState] = (),
        sessions: Iterable[SessionState] = (),
        target_chunk_s: float | None = None,
    ) -> None:
        """`target_chunk_s`: a worker takes only as many sessions as keep its chunk latency within this limit.
        None: as many as its own capacity."""
        self.target_chunk_s = target_chunk_s
        self.sessions: dict[str, SessionState] = {}
        self.entries: dict[str, PoolEntry] = {}
        """Workers that exist and workers that sessions name, by id."""
        self.pools: dict[PoolKey, Pool] = {}
        self.changes = 0
        """Number of changes of workers, sessions and quotas. Slacks and stamps of outside changes do not
        count."""
        self.urgency = Urgency()
        """Slacks of sessions, and the late chunks that workers expect."""
        self.quotas: Mapping[str, Mapping[str, int]] = {}
        """Class → worker → sessions of it that the worker should have. A class without quotas is missing."""
        self._keys: dict[str, list[PoolKey]] = {}
        """Model → keys of its pools."""
        for worker in workers:
            self.put_worker(worker)
        for session in sessions:
            self.put_session(session)

    @property
    def workers(self) -> dict[str, WorkerState]:
        """Workers that exist, by id."""
        return {name: entry.state for name, entry in self.entries.items() if entry.state is not NO_WORKER}

    def put_worker(self, worker: WorkerState) -> None:
        """Insert or replace a worker."""
        entry = self._entry(worker.id)
        before = entry.state
        if before == worker:
            return
        if before == with_fields(worker, changed_outside=before.changed_outside):
            # No ranking depends on the stamp.
            entry.state = worker
            return
        self.changes += 1
        self._leave(entry)
        entry.become(worker, self.target_chunk_s)
        pool = self.pool(worker.model, worker.weights_digest)
        pool.ready += entry.candidate
        pool.rank(entry)
        self.urgency.changed.add(entry.id)

    def drop_worker(self, worker: str) -> None:
        """Remove a worker. Its sessions remain until they are put or dropped."""
        entry = self.entries.get(worker)
        if entry is not None:
            self.changes += 1
            self._leave(entry)
            entry.become(NO_WORKER, None)
            self._tidy(entry)

    def put_session(self, session: SessionState) -> None:
        """Insert or replace a session."""
        before = self.sessions.get(session.id)
        if before == session:
            return
        self.changes += 1
        self.sessions[session.id] = session
        touched = self._unmark(before) if before is not None else {}
        touched.update(self._mark(session))
        if before is not None:
            self.pool(before.model, before.weights_digest).migrating.discard(session.id)
        if session.target is not None:
            self.pool(session.model, session.weights_digest).migrating.add(session.id)
        self._rank(touched)

    def drop_session(self, session: str) -> None:
        """Remove a session."""
        before = self.sessions.pop(session, None)
        self.urgency.slacks.pop(session, None)
        if before is not None:
            self.changes += 1
            self.pool(before.model, before.weights_digest).migrating.discard(session)
            self._rank(self._unmark(before))

    def put_slack(self, session: str, slack: ReportedSlack | None) -> None:
        """Replace the slack of a session; None: not known. A session that the cluster lacks is ignored."""
        state, slacks = self.sessions.get(session), self.urgency.slacks
        if state is None or slacks.get(session) == slack:
            return
        if slack is None:
            del slacks[session]
        else:
            slacks[session] = slack
        for worker, _ in _marks(state):
            self.urgency.changed.add(worker)

    def put_quotas(self, quotas: Mapping[str, Mapping[str, int]]) -> None:
        """Replace the quotas of all classes."""
        if quotas != self.quotas:
            self.changes += 1
            self.quotas = quotas

    def pool(self, model: str, weights_digest: str | None = None) -> Pool:
        """Return the pool of the workers with this model and these weights; makes it if there is none."""
        key = model, weights_digest
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = Pool()
            self._keys.setdefault(model, []).append(key)
        return pool

    def pools_for(self, model: str, weights_digest: str | None) -> list[Pool]:
        """Return the pools whose workers fit a session. `weights_digest` None: any weights will do."""
        if weights_digest is not None:
            return [self.pool(model, weights_digest)]
        return [self.pools[key] for key in self._keys.get(model, ())]

    def slots(self, worker: str) -> int:
        """Return K of a worker; 0 if it is not known."""
        entry = self.entries.get(worker)
        return 0 if entry is None else entry.slots

    def floor_slots(self, worker: str) -> int:
        """Return K_floor of a worker, whether it absorbs now or not; 0 if it is not known."""
        entry = self.entries.get(worker)
        return 0 if entry is None else entry.floor_slots

    def candidates(self) -> list[Candidate]:
        """Return the workers that may get sessions, in order of id, for `Placement.place`."""
        return [
            entry.as_candidate or self._candidate(entry)
            for _, entry in sorted(self.entries.items())
            if entry.candidate
        ]

    def _candidate(self, entry: PoolEntry) -> Candidate:
        state = entry.state
        entry.as_candidate = Candidate(
            worker=entry.id,
            model=state.model,
            weights_digest=state.weights_digest,
            capacity=entry.slots,
            load=entry.held,
            leaving=len(entry.going),
            suspect=state.suspect,
            chunk_latency_s=state.chunk_latency_s,
            floor_capacity=entry.limit,
            lends=state.lends,
            capability=state.capability,
            class_latency_s=state.class_latency_s,
            counts=class_counts(state, (self.sessions[name] for name in (*entry.here, *entry.coming))),
        )
        return entry.as_candidate

    # Sessions of workers

    def _entry(self, worker: str) -> PoolEntry:
        entry = self.entries.get(worker)
        if entry is None:
            entry = self.entries[worker] = PoolEntry(worker)
        return entry

    def _leave(self, entry: PoolEntry) -> None:
        state = entry.state
        if state is not NO_WORKER:
            pool = self.pool(state.model, state.weights_digest)
            pool.ready -= entry.candidate
            pool.forget(entry)
            self.urgency.changed.add(entry.id)

    def _mark(self, session: SessionState) -> dict[str, PoolEntry]:
        touched: dict[str, PoolEntry] = {}
        for worker, kind in _marks(session):
            entry = touched[worker] = self._entry(worker)
            getattr(entry, kind).add(session.id)
        return touched

    def _unmark(self, session: SessionState) -> dict[str, PoolEntry]:
        touched: dict[str, PoolEntry] = {}
        for worker, kind in _marks(session):
            entry = touched[worker] = self.entries[worker]
            getattr(entry, kind).discard(session.id)
        return touched

    def _rank(self, touched: dict[str, PoolEntry]) -> None:
        for entry in touched.values():
            entry.as_candidate = None
            self.urgency.changed.add(entry.id)
            if entry.state is NO_WORKER:
                self._tidy(entry)
            else:
                self.pool(entry.state.model, entry.state.weights_digest).rank(entry)

    def _tidy(self, entry: PoolEntry) -> None:
        if not (entry.here or entry.coming or entry.suspended):
            self.entries.pop(entry.id, None)


def _marks(session: SessionState) -> Iterator[tuple[str, str]]:
    """Yield each worker that counts the session, and the name of the `PoolEntry` set that holds it."""
    worker, target, reserved = session.worker, session.target, session.reserved
    if session.suspended:
        if worker is not None:
            yield worker, "suspended"
        if target is not None and target != worker:
            yield target, "suspended"
    elif worker is not None:
        yield worker, "here"
        if (target is not None and target != worker) or (reserved is not None and reserved != worker):
            yield worker, "going"
        if target is not None and target != worker:
            yield target, "coming"
    if reserved is not None and (session.suspended or reserved not in (worker, target)):
        yield reserved, "coming"
