"""The scheduler's core: events in, commands out. No clock, no I/O, no randomness of its own.

- Only the state store's rows are authoritative, and each carries a version. All other input is a hint.
- If a row is in doubt, the scheduler reads the row again and then decides again.
- At most one command per session is under way.
- A slot is reserved from the decision until its outcome is known. So a burst of sessions between two load
  reports cannot overfill a worker.
"""

from __future__ import annotations

from dataclasses import replace

from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import LoadReport
from turboserve.scheduler import deciding, listings
from turboserve.scheduler.class_views import choice_of_worker, classes_of, demand_with_entries, is_full
from turboserve.scheduler.deciding import PendingQuery, note_refusals, settle_declaration, settle_session
from turboserve.scheduler.hand_over import hand_over
from turboserve.scheduler.live_shares import LiveShares
from turboserve.scheduler.load_feedback import Feedback
from turboserve.scheduler.messages import (
    AllListed,
    Answered,
    BeginMigration,
    Command,
    DeclareGone,
    Event,
    ListAll,
    ListWorkers,
    LoadReported,
    MigrationRequested,
    OfSession,
    Place,
    PoolReported,
    ReadSession,
    RecordDecision,
    Reply,
    SendFeedback,
    SessionChanged,
    SharesSolved,
    Tick,
    ViewersReported,
    WorkerChanged,
    WorkersListed,
)
from turboserve.scheduler.migrations import Migrations
from turboserve.scheduler.operator_requests import OperatorRequests, not_ready
from turboserve.scheduler.placement import Cluster, Links, NeverMigrates, Placement, Rebalancer
from turboserve.scheduler.policy import Policy
from turboserve.scheduler.projections import ClusterProjection
from turboserve.scheduler.session_view import SessionView, Share, Waiting
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_view import ListeningTime


class Scheduler:
    """State of the scheduler in one term. All input goes through `handle`."""

    def __init__(
        self,
        placement: Placement,
        policy: Policy | None = None,
        rebalancer: Rebalancer | None = None,
        links: Links | None = None,
    ) -> None:
        """Start with an empty view.

        `links` are the rebalancer's link costs; every measured migration updates them. Without a rebalancer,
        only operators migrate sessions.
        """
        self.policy = policy or Policy()
        self.placement = placement
        self.migrations = Migrations(rebalancer or NeverMigrates(), links, self.policy)
        self.view = View()
        self.projection = ClusterProjection(
            self.view, self.policy.worker_timeout_s, self.policy.target_chunk_s
        )
        self.shares = LiveShares(self.view, self.policy.worker_timeout_s, self.policy.target_chunk_s)
        self.listening = ListeningTime()
        self.decisions = 0
        self.synced = False
        """Whether the first listing has filled the view. The core decides nothing before that."""
        self._commands: list[Command] = []
        self._under_way: dict[int, Command] = {}
        self._operators = OperatorRequests()
        self._listing = PendingQuery(self.policy.resync_least_s)
        self._listing.wanted = True
        self._look = PendingQuery(0.0)
        self._served: dict[Share, int] = {}
        """(Model, tenant) → number of the decision that last gave the tenant a slot of the model."""
        self._feedback = Feedback(self.view, self.projection, self.policy.feedback_s)

    @property
    def waiting(self) -> int:
        """Number of sessions that need a worker."""
        return sum(1 for name in self.view.wanting if self.view.kind(self.view.sessions[name]) is not None)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Process one event at monotonic time `now` (seconds); returns the commands to run, in order."""
        self._commands = []
        self.listening.advance(now, event.connected if isinstance(event, Tick) else None)
        match event:
            case ViewersReported(session, viewers):
                if viewers > 0 and session in self.view.sessions:
                    self.view.sessions[session].watched_at = self.listening.now
                # Only the next tick uses this. Return early, since this is the most frequent event.
                return []
            case Tick():
                self._tick(now)
            case SessionChanged(record):
                self._session_changed(record)
            case WorkerChanged(record):
                self.view.put_worker(record, self.listening.now)
            case LoadReported(report):
                self._load_reported(report, now)
            case PoolReported(status):
                if status.model is not None:
                    self.view.put_pool(status.pool, status.model, status.absorbs, self.listening.now)
            case WorkersListed(ticket, workers):
                if (asked_at := self._answer(self._look, ticket)) is not None:
                    listings.apply_workers(self.view, ticket, asked_at, workers, self.listening.now)
            case AllListed(ticket):
                if (asked_at := self._answer(self._listing, ticket)) is not None:
                    listings.apply_all(self.view, event, asked_at, self.listening.now)
                    self.synced = True
            case MigrationRequested() if not self.synced:
                self._send(Reply(event.request, error=not_ready()))
            case MigrationRequested():
                there = self._cluster(now).candidates()
                for answer in self._operators.ask(event, self.view, self.placement, there, now, self._take):
                    self._begin(answer)
            case SharesSolved():
                self._under_way.pop(event.ticket, None)
                self.shares.solved(event, self._cluster(now), now)
            case Answered():
                self._answered(event, now)
        if self._listing.due(now):
            self._send(ListAll(self._ask(self._listing, now)))
        if self.synced:
            self.migrations.wanted = self.migrations.wanted or not isinstance(event, Tick)
            if self.view.migrating or self.view.ended_migrations:
                for step in self.migrations.drive(self.view, now, self.listening.now, self._take):
                    self._send(step)
            self._decide(now)
            if self.policy.shares and self.projection.several:
                for solve in self.shares.update(self._cluster(now), now, self.listening.now):
                    self._send(solve)
            if len(self.view.workers) > 1:
                # One worker alone has no target for a migration.
                self._rebalance(now)
            quiet = not self._commands and isinstance(event, Tick | LoadReported)
            self._commands += self._feedback.reports(self._cluster(now), self.decisions, now, quiet)
        commands, self._commands = self._commands, []
        return commands

    # Time

    def _tick(self, now: float) -> None:
        if not self.synced:
            return
        listened = self.listening.now
        for declare in deciding.declare_silent(self.view, self.policy, now, listened):
            self._send(declare)
        self._look.wanted = any(
            worker.wants_look(listened, self.policy.worker_timeout_s) for worker in self.view.workers.values()
        )
        if self._look.due(now):
            self._send(ListWorkers(self._ask(self._look, now)))
        if self._listing.older_than(self.policy.resync_s, now):
            self._listing.wanted = True
        for suspend in deciding.suspend_idle(self.view, self.policy, now, listened, self._take):
            self._send(suspend)
        for release in hand_over(self.view, now, self.policy.migrations_per_worker, self._take):
            self._send(release)

    # Rows and reports

    def _session_changed(self, record: SessionRecord) -> None:
        session = self.view.put_session(record, self.listening.now)
        if session is None:
            return
        if session.record.worker is not None and not self.view.knows(session.record.worker):
            self._listing.wanted = True
        self.view.settle(session)

    def _load_reported(self, report: LoadReport, now: float) -> None:
        worker = self.view.put_report(report, self.listening.now, now)
        if worker is None:
            # List the rows first: the store refuses to place a session on a worker without a row.
            self._listing.wanted = self._listing.wanted or not self.view.is_gone(report.worker)
            return
        note_refusals(self.view, self.policy, worker, report, now)

    def _answered(self, event: Answered, now: float) -> None:
        command = self._under_way.pop(event.ticket, None)
        match command:
            case ListAll():
                # `Answered` means that the listing failed. A listing that succeeds is an `AllListed`.
                self._listing.answered(event.ticket)
                self._listing.wanted = True
            case ListWorkers():
                self._look.answered(event.ticket)
            case DeclareGone():
                settle_declaration(self.view, self.policy, command, event, now)
            case _ if isinstance(command, OfSession):
                if isinstance(command, BeginMigration):
                    self._commands += self._operators.answered(self.view, command, event)
                session = self.view.sessions.get(command.session)
                if session is None or session.ticket != event.ticket:
                    return
                session.command_answered()
                surprised = settle_session(
                    self.view, self.policy, session, command, event, now, self.listening.now
                )
                self._listing.wanted = self._listing.wanted or surprised
            case _:
                pass

    # Decisions

    def _cluster(self, now: float) -> Cluster:
        return self.projection.cluster(now, self.listening.now)

    def _decide(self, now: float) -> None:
        ripe = []
        for name in sorted(self.view.wanting):
            session = self.view.sessions[name]
            if session.waiting is None and self.view.kind(session) is not None:
                session.waiting = Waiting(since=now)
            if not session.may_send(now):
                continue
            if session.in_doubt:
                self._send(ReadSession(self._take(session), session.id))
            else:
                ripe.append(session)
        if not ripe:
            return
        ripe = deciding.in_slot_order(self.view, ripe, self._served)
        kinds = [self.view.kind(session) or "place" for session in ripe]
        served = {one for w in self.view.workers.values() if w.ready for one in classes_of(w)}
        limit_s = self.policy.weights_wait_s
        demands = [
            demand_with_entries(
                self.view,
                deciding.demand_of(s, kind, deciding.weights_needed(s, served, limit_s, now), now),
            )
            for s, kind in zip(ripe, kinds, strict=True)
        ]
        choices = map(choice_of_worker, self.placement.assign(self._cluster(now), demands))
        for session, kind, choice in zip(ripe, kinds, choices, strict=True):
            if choice.worker is not None and is_full(self.view, choice.worker, session):
                continue
            other_weights = choice.worker is not None and session.record.weights_digest not in (
                None,
                self.view.workers[choice.worker].digest_of(session.record.model),
            )
            decision = deciding.decision_of(session, kind, choice, other_weights, now)
            if choice.worker is not None:
                self.decisions += 1
                self._served[session.share] = self.decisions
                self.view.reserve(session, choice.worker)
                self._send(Place(self._take(session), session.record.version, decision, other_weights))
            elif session.waiting is not None and session.waiting.noted != choice.reason:
                session.waiting = replace(session.waiting, noted=choice.reason)
                self._commands.append(RecordDecision(decision))

    def _rebalance(self, now: float) -> None:
        waiting = self.waiting > 0
        for begin in self.migrations.propose(self.view, lambda: self._cluster(now), now, waiting, self._take):
            self._begin(begin)

    # Commands under way

    def _begin(self, command: BeginMigration | Reply | RecordDecision) -> None:
        self.decisions += isinstance(command, BeginMigration)
        self._send(command)

    def _take(self, session: SessionView) -> int:
        ticket = self.view.stamp()
        session.command_sent(ticket)
        return ticket

    def _ask(self, question: PendingQuery, now: float) -> int:
        ticket = self.view.stamp()
        question.ask(ticket, now, self.listening.now)
        return ticket

    def _answer(self, question: PendingQuery, ticket: int) -> float | None:
        self._under_way.pop(ticket, None)
        return question.answered(ticket)

    def _send(self, command: Command) -> None:
        if not isinstance(command, RecordDecision | SendFeedback | Reply):
            self._under_way[command.ticket] = command
        self._commands.append(command)
