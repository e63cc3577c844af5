"""What the scheduler knows of workers and sessions: bookkeeping only, no decisions."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import LoadReport, WorkerPhase, WorkerRecord

REMEMBERED = 10_000
"""Ended sessions and gone workers that are remembered, so that a late message does not bring them back."""


@dataclass
class WorkerView:
    """One worker that is not gone."""

    id: str
    model: str
    capacity: int
    phase: WorkerPhase
    heard_at: float
    """Listening time (see `liveness`) at which it was surely alive."""
    looked_at: float
    """Listening time at which the newest read of its row was asked for."""
    renewed_at: float
    """Its row's `renewed_at`; only ever compared with itself."""
    renewal_seen_at: float = 0.0
    """Listening time at which a read first showed its newest renewal."""
    known_since: int = 0
    """Stamp of its creation here."""
    draining: bool = False
    gone: bool = False
    chunk_latency_s: dict[int, float] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    """Sessions whose rows hold a slot here."""
    reserved: set[str] = field(default_factory=set)
    """Sessions that were decided to go here; the decision is not confirmed yet."""
    holding: set[str] = field(default_factory=set)
    """Suspended sessions whose rows name this worker."""
    full_until: float = 0.0
    """The store said it is full when we thought otherwise; not before this time again."""
    declaring: bool = False
    """It is being declared gone."""
    declare_after: float = 0.0
    """It is not declared gone (again) before this time."""

    @property
    def load(self) -> int:
        """Sessions that hold a slot or have one reserved, each once."""
        return len(self.used) + sum(1 for session in self.reserved if session not in self.used)

    @property
    def ready(self) -> bool:
        """Whether it may be given sessions."""
        return self.phase is WorkerPhase.READY and not self.draining and not self.declaring


@dataclass
class SessionView:
    """One session that has not ended."""

    record: SessionRecord
    touched: int
    """Stamp of the last time something was learnt about the row."""
    watched_at: float
    """Listening time at which it last had a viewer, or was first wanted."""
    ticket: int | None = None
    """The one command under way for it."""
    reserved_on: str | None = None
    must_read: bool = False
    """What we know of its row is doubtful."""
    not_before: float = 0.0
    """No command for it before this time."""
    failures: int = 0
    """Commands in a row that failed."""
    waiting_since: float | None = None
    """When it came to need a worker; None while it has one or wants none."""
    refused_epoch: int | None = None
    """The epoch that its worker refused to run."""
    refusals: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Worker → how often it refused this session, and until when it is not asked again."""
    noted: str | None = None
    """The reason for waiting that was last noted."""

    @property
    def id(self) -> str:
        return self.record.id

    def is_free(self, now: float) -> bool:
        """Whether a command for it may be given."""
        return self.ticket is None and self.not_before <= now


class View:
    """All workers and sessions, and which is where. Rows win by version; what is over stays over."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerView] = {}
        self.sessions: dict[str, SessionView] = {}
        self.wanting: set[str] = set()
        """Sessions that need a worker, or whose row has to be read."""
        self._stamp = 0
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def stamp(self) -> int:
        """A number larger than all before: orders what was learnt against what was asked."""
        self._stamp += 1
        return self._stamp

    # Workers

    def is_gone(self, worker: str) -> bool:
        return worker in self._gone

    def knows(self, worker: str) -> bool:
        """Whether it is known to live or to be gone."""
        return worker in self.workers or worker in self._gone

    def put_worker(self, record: WorkerRecord, listened: float) -> WorkerView | None:
        """Take over a row; returns its view, or None if the worker is gone."""
        if record.phase is WorkerPhase.GONE:
            self.drop_worker(record.id)
            return None
        if self.is_gone(record.id):
            return None
        worker = self.workers.get(record.id)
        if worker is None:
            worker = WorkerView(
                id=record.id,
                model=record.model,
                capacity=record.capacity,
                phase=record.phase,
                heard_at=listened,
                looked_at=listened,
                renewed_at=record.renewed_at,
                renewal_seen_at=listened,
                known_since=self.stamp(),
            )
            self.workers[record.id] = worker
            for session in self.sessions.values():
                if session.record.worker == record.id:
                    self._count(session.record, worker)
        worker.draining = worker.draining or record.phase is WorkerPhase.DRAINING
        worker.phase, worker.capacity = record.phase, record.capacity
        if record.chunk_latency_s:
            worker.chunk_latency_s = dict(record.chunk_latency_s)
        return worker

    def put_report(self, report: LoadReport, heard_at: float) -> WorkerView | None:
        """Take over what a known worker says; None if it is not known."""
        worker = self.workers.get(report.worker)
        if worker is None:
            return None
        worker.heard_at = heard_at
        worker.draining = worker.draining or report.phase is WorkerPhase.DRAINING
        worker.phase, worker.capacity = report.phase, report.capacity
        if report.chunk_latency_s:
            worker.chunk_latency_s = dict(report.chunk_latency_s)
        return worker

    def drop_worker(self, worker: str) -> None:
        """It is gone for good; its sessions come to want another."""
        _remember(self._gone, worker)
        view = self.workers.pop(worker, None)
        if view is None:
            return
        view.gone = True
        for session in [*view.used, *view.holding, *view.reserved]:
            self.settle(self.sessions.get(session))

    # Sessions

    def put_session(self, record: SessionRecord, listened: float) -> SessionView | None:
        """Take over a row if it is newer than what is known; returns the session's view if it goes on."""
        if record.id in self._ended:
            return None
        session = self.sessions.get(record.id)
        touched = self.stamp()
        if session is not None and record.unwatched_s is not None:
            session.watched_at = max(session.watched_at, listened - record.unwatched_s)
        if session is not None and record.version <= session.record.version:
            if record.version == session.record.version:
                session.touched = touched
            return session
        if record.phase.ended:
            self.drop_session(record.id)
            return None
        if session is None:
            session = SessionView(record, touched, listened)
            self.sessions[record.id] = session
            self._count(record, self.workers.get(record.worker or ""))
            return session
        before, session.record = session.record, record
        session.touched = touched
        self._uncount(before)
        self._count(record, self.workers.get(record.worker or ""))
        if record.epoch != before.epoch:
            session.refused_epoch = None
        became_active = record.phase is Phase.ACTIVE and before.phase is not Phase.ACTIVE
        if became_active or (
            record.activity is Activity.WATCHING and before.activity is not Activity.WATCHING
        ):
            session.watched_at = listened
        return session

    def drop_session(self, session: str) -> None:
        """It has ended."""
        _remember(self._ended, session)
        self.forget_session(session)

    def forget_session(self, session: str) -> None:
        """It is not there any more."""
        view = self.sessions.pop(session, None)
        self.wanting.discard(session)
        if view is not None:
            self.release(view)
            self._uncount(view.record)

    def reserve(self, session: SessionView, worker: str) -> None:
        self.release(session)
        session.reserved_on = worker
        self.workers[worker].reserved.add(session.id)

    def release(self, session: SessionView) -> None:
        """Give back the session's reservation, if it has one."""
        if session.reserved_on is not None:
            worker = self.workers.get(session.reserved_on)
            if worker is not None:
                worker.reserved.discard(session.id)
            session.reserved_on = None

    def kind(self, session: SessionView) -> str | None:
        """Why the session needs a worker: place, resume, recover; None if it does not."""
        record = session.record
        if record.activity is not Activity.WATCHING or record.phase.ended:
            return None
        if record.phase is Phase.REQUESTED:
            return "place"
        lost = record.worker is not None and self.is_gone(record.worker)
        if record.phase is Phase.SUSPENDED:
            return "recover" if lost else "resume"
        if lost or record.worker is None:
            return "recover"
        return "place" if session.refused_epoch == record.epoch else None

    def settle(self, session: SessionView | None) -> None:
        """Bring `wanting` up to date for one session."""
        if session is None or session.id not in self.sessions:
            return
        if session.must_read or self.kind(session) is not None:
            self.wanting.add(session.id)
        else:
            self.wanting.discard(session.id)
            session.waiting_since, session.noted = None, None

    @staticmethod
    def _count(record: SessionRecord, worker: WorkerView | None) -> None:
        if worker is None:
            return
        if record.phase.holds_slot:
            worker.used.add(record.id)
        elif record.phase is Phase.SUSPENDED:
            worker.holding.add(record.id)

    def _uncount(self, record: SessionRecord) -> None:
        worker = self.workers.get(record.worker or "")
        if worker is not None:
            worker.used.discard(record.id)
            worker.holding.discard(record.id)


def _remember(names: OrderedDict[str, None], name: str) -> None:
    names[name] = None
    names.move_to_end(name)
    while len(names) > REMEMBERED:
        names.popitem(last=False)
