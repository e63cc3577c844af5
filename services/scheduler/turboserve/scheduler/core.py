"""The scheduler's core: events in, commands out. No clock, no I/O, no randomness of its own.

Rows are the truth and carry a version; everything else is a hint. Whatever is doubtful is read again, and
then decided again. There is at most one command under way per session, and from a decision until its outcome
is known the slot is reserved, so that a burst inside one load report cannot overfill a worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.pool import LoadFeedback
from turboserve.contracts.sessions import Activity, Decision, Phase, SessionRecord
from turboserve.contracts.workers import LoadReport, WorkerRecord
from turboserve.scheduler import liveness
from turboserve.scheduler.feedback import load_feedback
from turboserve.scheduler.messages import (
    AllListed,
    Answered,
    Command,
    DeclareGone,
    Event,
    ListAll,
    ListWorkers,
    LoadReported,
    Note,
    Place,
    ReadSession,
    Refused,
    Report,
    SessionChanged,
    SuspendIdle,
    Tick,
    Watched,
    WorkerChanged,
    WorkersListed,
)
from turboserve.scheduler.placement import Candidate, Demand, Placement
from turboserve.scheduler.view import SessionView, View


@dataclass(frozen=True)
class Policy:
    """The core's parameters, seconds."""

    worker_timeout_s: float = 12.0
    idle_after_s: float = 60.0
    resync_s: float = 15.0
    """Between two listings of everything: whatever was missed heals by then."""
    resync_least_s: float = 1.0
    """Between two listings that were asked for by surprises."""
    retry_s: float = 0.5
    retry_limit_s: float = 10.0
    full_s: float = 1.0
    """A worker that the store called full is not tried again for this long."""
    refused_s: float = 5.0
    """A worker that refused a session is not asked again for this long, twice as long each time."""
    refused_limit_s: float = 60.0
    feedback_s: float = 1.0


class Scheduler:
    """State of one scheduler process; `handle` is its only entrance."""

    def __init__(self, placement: Placement, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.placement = placement
        self.view = View()
        self.listening = liveness.ListeningTime()
        self.decisions = 0
        self._commands: list[Command] = []
        self._under_way: dict[int, Command] = {}
        self._synced = False
        self._listing: int | None = None
        self._looking: int | None = None
        self._listed_at: float | None = None
        self._list_wanted = True
        self._retry_gone: dict[str, float] = {}
        self._fed_at: float | None = None
        self._fed: list[LoadFeedback] = []

    @property
    def synced(self) -> bool:
        """Whether the view has been filled from the store once; nothing is decided before."""
        return self._synced

    @property
    def waiting(self) -> int:
        """Sessions that need a worker."""
        return sum(1 for name in self.view.wanting if self.view.kind(self.view.sessions[name]) is not None)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event at monotonic time `now`; returns what to do, in order."""
        self._commands = []
        self.listening.advance(now, event.connected if isinstance(event, Tick) else None)
        match event:
            case Tick():
                self._tick(now)
            case SessionChanged(record):
                self._session_changed(record)
            case WorkerChanged(record):
                self._row_of_worker(record)
            case LoadReported(report):
                self._load_reported(report, now)
            case Watched(session, viewers):
                if viewers > 0 and session in self.view.sessions:
                    self.view.sessions[session].watched_at = self.listening.now
            case WorkersListed():
                self._under_way.pop(event.ticket, None)
                self._looking = None
                self._workers_listed(event.ticket, event.workers)
            case AllListed():
                self._all_listed(event, now)
            case Answered():
                self._answered(event, now)
        self._list_all(now)
        if self._synced:
            self._decide(now)
            self._feed_back(now)
        commands, self._commands = self._commands, []
        return commands

    # Time

    def _tick(self, now: float) -> None:
        if not self._synced:
            return
        listened, timeout_s = self.listening.now, self.policy.worker_timeout_s
        for worker in list(self.view.workers.values()):
            due = self._retry_gone.get(worker.id, 0.0) <= now
            if not worker.declaring and due and liveness.is_dead(worker, listened, timeout_s):
                worker.declaring = True
                silent_s = listened - worker.heard_at
                reason = f"not heard of for {silent_s:.1f} s, limit {timeout_s:g} s"
                self._send(DeclareGone(self.view.stamp(), worker.id, reason))
        if self._looking is None and liveness.wants_look(self.view.workers.values(), listened, timeout_s):
            self._looking = self.view.stamp()
            self._send(ListWorkers(self._looking))
        if self._listed_at is not None and now - self._listed_at >= self.policy.resync_s:
            self._list_wanted = True
        self._suspend_idle(now)

    def _suspend_idle(self, now: float) -> None:
        for session in self.view.sessions.values():
            record = session.record
            if (
                record.activity is Activity.WATCHING
                and record.phase in (Phase.ACTIVE, Phase.REQUESTED)
                and self.listening.now - session.watched_at >= self.policy.idle_after_s
                and self._free(session, now)
            ):
                self._send(SuspendIdle(self._take(session), session.id, record.version), session)

    def _list_all(self, now: float) -> None:
        if not self._list_wanted or self._listing is not None:
            return
        if self._listed_at is not None and now - self._listed_at < self.policy.resync_least_s:
            return
        self._list_wanted = False
        self._listed_at = now
        self._listing = self.view.stamp()
        self._send(ListAll(self._listing))

    # What others say

    def _session_changed(self, record: SessionRecord) -> None:
        session = self.view.put_session(record, self.listening.now)
        if session is None:
            return
        if session.record.worker is not None and not self._known(session.record.worker):
            self._list_wanted = True
        self.view.settle(session)

    def _known(self, worker: str) -> bool:
        return worker in self.view.workers or self.view.is_gone(worker)

    def _row_of_worker(self, record: WorkerRecord) -> None:
        new = record.id not in self.view.workers
        worker = self.view.put_worker(record, self.listening.now, self.listening.now)
        if worker is not None and new:
            for name in [*worker.used, *worker.holding]:
                self.view.settle(self.view.sessions.get(name))

    def _load_reported(self, report: LoadReport, now: float) -> None:
        worker = self.view.put_report(report, self.listening.now)
        if worker is None:
            # Its row comes first: the store would refuse to place anything on a worker without one.
            self._list_wanted = self._list_wanted or not self.view.is_gone(report.worker)
            return
        for refusal in report.refusals:
            session = self.view.sessions.get(refusal.session)
            if (
                session is None
                or session.record.worker != report.worker
                or session.record.epoch != refusal.epoch
                or session.refused_epoch == refusal.epoch
            ):
                continue
            times = session.refusals.get(report.worker, (0, 0.0))[0] + 1
            rest_s = min(self.policy.refused_s * 2 ** min(times - 1, 16), self.policy.refused_limit_s)
            session.refusals[report.worker] = (times, now + rest_s)
            session.refused_epoch = refusal.epoch
            self.view.settle(session)

    def _workers_listed(self, ticket: int, records: tuple[WorkerRecord, ...]) -> None:
        listened = self.listening.now
        for record in records:
            known = self.view.workers.get(record.id)
            if known is not None:
                liveness.note_renewal(known, record.renewed_at, listened)
            self._row_of_worker(record)
        listed = {record.id for record in records}
        for worker in list(self.view.workers.values()):
            # A worker that was in the store before the question and is not in the answer has gone meanwhile.
            if worker.id not in listed and worker.known_since < ticket:
                self.view.drop_worker(worker.id)

    def _all_listed(self, event: AllListed, now: float) -> None:
        if self._under_way.pop(event.ticket, None) is None:
            return
        self._listing = None
        self._workers_listed(event.ticket, event.workers)
        for record in event.sessions:
            session = self.view.put_session(record, self.listening.now)
            if session is None:
                continue
            owner = session.record.worker
            # Workers were listed after sessions: an owner that is not among them is gone.
            if owner is not None and session.record.version == record.version and not self._known(owner):
                self.view.drop_worker(owner)
            self.view.settle(session)
        listed = {record.id for record in event.sessions}
        for session in list(self.view.sessions.values()):
            if session.id not in listed and session.touched < event.ticket and session.ticket is None:
                self.view.forget_session(session.id)
        self._synced = True

    # What became of commands

    def _answered(self, event: Answered, now: float) -> None:
        command = self._under_way.pop(event.ticket, None)
        match command:
            case ListAll():
                # Answered means failed: the rows would have come as AllListed.
                self._listing, self._list_wanted = None, True
            case ListWorkers():
                self._looking = None
            case DeclareGone(worker=worker):
                self._declared(worker, event.refused, now)
            case Place() | SuspendIdle() | ReadSession():
                session = self.view.sessions.get(command.session)
                if session is not None and session.ticket == event.ticket:
                    session.ticket = None
                    self._settle_answer(session, command, event, now)
                elif event.record is not None:
                    self._session_changed(event.record)
            case _:
                pass

    def _declared(self, name: str, refused: Refused | None, now: float) -> None:
        worker = self.view.workers.get(name)
        if refused in (None, Refused.NOT_FOUND, Refused.WORKER_GONE):
            self._retry_gone.pop(name, None)
            self.view.drop_worker(name)
        elif worker is not None:
            worker.declaring = False
            self._retry_gone[name] = now + self.policy.retry_s

    def _settle_answer(
        self, session: SessionView, command: Place | SuspendIdle | ReadSession, event: Answered, now: float
    ) -> None:
        """The command's outcome is known, or known to be unknown."""
        refused = event.refused
        if event.record is not None:
            session.must_read, session.failures = False, 0
            if self.view.put_session(event.record, self.listening.now) is None:
                return
        elif refused is Refused.NOT_FOUND:
            self.view.drop_session(session.id)
            return
        elif isinstance(command, Place) and refused is Refused.NO_CAPACITY:
            self._list_wanted = True
            if command.worker in self.view.workers:
                self.view.workers[command.worker].full_until = now + self.policy.full_s
        elif isinstance(command, Place) and refused is Refused.WORKER_GONE:
            self.view.drop_worker(command.worker)
        else:
            if refused is not Refused.CONFLICT:
                session.failures += 1
                wait_s = self.policy.retry_s * 2 ** min(session.failures - 1, 16)
                session.not_before = now + min(wait_s, self.policy.retry_limit_s)
            if refused is not Refused.NOT_SENT:
                session.must_read = True
        if not session.must_read:
            self.view.release(session)
        self.view.settle(session)

    # Decisions

    def _decide(self, now: float) -> None:
        if not self.view.wanting:
            return
        wanting = [self.view.sessions[name] for name in self.view.wanting]
        demands: list[tuple[SessionView, Demand]] = []
        for session in sorted(wanting, key=lambda s: s.id):
            kind = self.view.kind(session)
            if kind is not None and session.waiting_since is None:
                session.waiting_since = now
            if not self._free(session, now, even_unread=True):
                continue
            if session.must_read:
                self._send(ReadSession(self._take(session), session.id), session)
            elif kind is not None:
                demands.append((session, self._demand(session, kind, now)))
        if not demands:
            return
        demands.sort(key=lambda pair: _precedence(pair[0]))
        choices = self.placement.place(self._candidates(now), [demand for _, demand in demands])
        for (session, demand), choice in zip(demands, choices, strict=True):
            waited_s = now - (now if session.waiting_since is None else session.waiting_since)
            decision = Decision(
                session=session.id,
                epoch=session.record.epoch + (choice.worker is not None),
                worker=choice.worker,
                kind="wait" if choice.worker is None else demand.kind,
                reason=choice.reason,
                numbers={**choice.numbers, "waited_s": waited_s},
            )
            if choice.worker is None:
                if session.noted != choice.reason:
                    session.noted = choice.reason
                    self._commands.append(Note(decision))
                continue
            self.decisions += 1
            self.view.reserve(session, choice.worker)
            self._send(Place(self._take(session), session.record.version, decision), session)

    def _demand(self, session: SessionView, kind: str, now: float) -> Demand:
        record = session.record
        excluded = {worker for worker, (_, until) in session.refusals.items() if until > now}
        return Demand(
            session=session.id,
            model=record.model,
            kind=kind,
            holder=record.worker if record.phase is Phase.SUSPENDED else None,
            counted_on=record.worker if record.phase.holds_slot else None,
            excluded=frozenset(excluded),
        )

    def _candidates(self, now: float) -> list[Candidate]:
        listened, timeout_s = self.listening.now, self.policy.worker_timeout_s
        return [
            Candidate(
                worker=worker.id,
                model=worker.model,
                capacity=worker.capacity,
                load=worker.load,
                suspect=liveness.is_suspect(worker, listened, timeout_s),
                chunk_latency_s=worker.chunk_latency_s,
            )
            for worker in sorted(self.view.workers.values(), key=lambda w: w.id)
            if worker.ready and worker.full_until <= now
        ]

    def _feed_back(self, now: float) -> None:
        if self._fed_at is not None and now < self._fed_at + self.policy.feedback_s and not self._commands:
            return
        feedback = load_feedback(self.view, self.decisions)
        if feedback == self._fed and self._fed_at is not None and now < self._fed_at + self.policy.feedback_s:
            return
        self._fed_at, self._fed = now, feedback
        self._commands.extend(Report(one) for one in feedback)

    # Commands under way

    @staticmethod
    def _free(session: SessionView, now: float, even_unread: bool = False) -> bool:
        return session.ticket is None and session.not_before <= now and (even_unread or not session.must_read)

    def _take(self, session: SessionView) -> int:
        session.ticket = self.view.stamp()
        return session.ticket

    def _send(self, command: Command, session: SessionView | None = None) -> None:
        if not isinstance(command, Note | Report):
            self._under_way[command.ticket] = command
        self._commands.append(command)


def _precedence(session: SessionView) -> tuple[float, float, str]:
    """Who waited longest comes first; after a restart of the scheduler, who was created first."""
    since = session.waiting_since if session.waiting_since is not None else 0.0
    return since, session.record.created_at, session.id
