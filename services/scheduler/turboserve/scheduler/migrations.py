"""Migrations of live sessions: which ones begin, and how each one ends.

The rebalancer decides which migrations are worth their cost. Each migration has the same steps:

1. One compare-and-set in the session's row begins it.
2. The target copies the state and reports its progress.
3. The scheduler commits it when the state is verified, or abandons it when the target fails or is too slow.

The session's row records the migration, and the target repeats its report as long as the row does. So a new
leader finds every migration under way and continues it.

Where no migration is possible, `hand_over` empties a draining worker. No other worker can take its states,
such as those of the last worker of a checkpoint. Running sessions are placed on another worker and continue
from their latents. Suspended sessions have no owner until they are resumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import assert_never

from turboserve.contracts.sessions import Decision, Phase, SessionRecord
from turboserve.contracts.workers import NO_STATE, MigrationReport, MigrationStage
from turboserve.scheduler.class_views import is_full, migration_of_workers, several_of
from turboserve.scheduler.messages import AbandonMigration, BeginMigration, CommitMigration
from turboserve.scheduler.placement import Cluster, Links, Migration, MigrationKind, Rebalancer
from turboserve.scheduler.placement.links import kind_between
from turboserve.scheduler.placement.quota_preference import QuotaGuard
from turboserve.scheduler.policy import Policy
from turboserve.scheduler.session_view import (
    AwaitingLimit,
    Copying,
    MigrationProgress,
    SessionView,
    Uncommittable,
)
from turboserve.scheduler.view import View

Take = Callable[[SessionView], int]
"""Returns the ticket of a session's next command."""
Step = CommitMigration | AbandonMigration


class Migrations:
    """Begins, commits and abandons migrations. Its only state beside the view is the last rebalancer call."""

    def __init__(self, rebalancer: Rebalancer, links: Links | None, policy: Policy) -> None:
        """`links`: link costs that each measured migration updates."""
        self._rebalancer, self._links, self._policy = rebalancer, links, policy
        self.wanted = False
        """Whether anything has changed since the last call of the rebalancer."""
        self._looked_at: float | None = None

    # Migrations under way

    def drive(
        self, view: View, now: float, listened: float, take: Take
    ) -> Iterator[CommitMigration | AbandonMigration]:
        """Commit each migration whose state is verified, and abandon each one that cannot be committed."""
        self._note_ends(view, now)
        for name in sorted(view.migrating):
            session = view.sessions[name]
            progress = session.migration
            if progress is None or progress.migration != session.record.migration:
                assert session.record.migration is not None
                session.migration = progress = AwaitingLimit(session.record.migration, since=listened)
            if session.may_change(now):
                step = self._step(view, session, progress, listened, take)
                if step is not None:
                    yield step

    def _step(
        self, view: View, session: SessionView, progress: MigrationProgress, listened: float, take: Take
    ) -> Step | None:
        record = session.record
        assert record.target is not None
        report = _report(view, record)
        if isinstance(progress, AwaitingLimit) and report is not None and report.limit_s:
            timeout_s = min(report.limit_s, self._policy.migration_timeout_max_s)
            timeout_s += self._policy.migration_margin_s
            session.migration = progress = Copying(progress.migration, listened, timeout_s)
        verified = report is not None and report.stage is MigrationStage.VERIFIED
        if report is not None and verified and not isinstance(progress, Uncommittable):
            return CommitMigration(
                take(session),
                session.id,
                progress.migration,
                record.target,
                report.next_chunk,
                report.digest,
                {"bytes_copied": report.bytes_copied, "seconds": report.seconds},
            )
        reason = self._why_not(view, record, progress, report, listened)
        if reason is None:
            return None
        empty = report is not None and report.stage is MigrationStage.FAILED and report.code == NO_STATE
        return AbandonMigration(take(session), session.id, progress.migration, reason, release=empty)

    def _why_not(
        self,
        view: View,
        record: SessionRecord,
        progress: MigrationProgress,
        report: MigrationReport | None,
        listened: float,
    ) -> str | None:
        """Return why to abandon the migration; None if it continues.

        The loss of the source is no reason for a session with a slot: it is recovered by a new placement.
        """
        match progress:
            case Uncommittable(reason=reason):
                return reason
            case AwaitingLimit(since=since):
                timeout_s = self._policy.migration_timeout_s
            case Copying(since=since, timeout_s=timeout_s):
                pass
            case _:
                assert_never(progress)
        if report is not None and report.stage is MigrationStage.FAILED:
            return report.reason or "the target says that it failed"
        if view.is_gone(record.target or ""):
            return f"{record.target} is gone"
        if record.target in view.workers and view.workers[record.target].draining:
            # The session would have to leave again at once, and the drain would take longer.
            return f"{record.target} is draining"
        if record.phase is Phase.SUSPENDED and view.is_gone(record.worker or ""):
            return f"{record.worker} is gone, with the state"
        if listened - since >= timeout_s:
            return f"its state was not verified within {timeout_s:g} s"
        return None

    def _note_ends(self, view: View, now: float) -> None:
        over, view.ended_migrations = view.ended_migrations, []
        for session, before in over:
            after, rests_until = session.record, now + self._policy.migration_cooldown_s
            landed = after.worker == before.target
            if landed and after.phase.holds_slot and session.rebalanced_to == before.target:
                left = {name: at for name, at in session.left.items() if name in view.workers}
                session.left = left | {before.worker or "": view.stamp()}
            elif landed or after.worker != before.worker or not after.phase.holds_slot:
                view.changed_outside(before.worker, after.worker)
            if landed:
                session.rests_until, session.failed_in_epoch = rests_until, None
                self._learn(view, before)
            elif (after.epoch, after.activity) == (before.epoch, before.activity):
                epoch, failures = session.failed_in_epoch or (after.epoch, 0)
                failures = failures + 1 if epoch == after.epoch else 1
                session.failed_in_epoch = after.epoch, failures
                session.retries_at = now + self._policy.rest_after_failed(failures)
                session.migration_failures[before.target or ""] = session.rests_until = rests_until

    def _learn(self, view: View, before: SessionRecord) -> None:
        report = _report(view, before)
        if report is None or report.stage is not MigrationStage.VERIFIED:
            return
        view.state_bytes[before.model] = report.bytes_copied
        source, target = view.workers.get(before.worker or ""), view.workers.get(before.target or "")
        if self._links is not None and source is not None and target is not None and report.seconds > 0:
            kind = kind_between(source.host, target.host)
            self._links.observe(kind, report.bytes_copied, report.seconds)

    # New migrations

    def propose(
        self, view: View, cluster: Callable[[], Cluster], now: float, waiting: bool, take: Take
    ) -> Iterator[BeginMigration]:
        """Call the rebalancer if it is due, and begin its proposals within the limits of the policy.

        `waiting`: sessions wait for a slot. Free slots are then kept for them, and only drains begin.
        """
        since_s = None if self._looked_at is None else now - self._looked_at
        if since_s is not None and since_s < (
            self._policy.rebalance_least_s if self.wanted else self._policy.rebalance_s
        ):
            return
        self.wanted, self._looked_at = False, now
        if waiting and not any(worker.draining for worker in view.workers.values()):
            # A plan takes longer than the placements that it would delay.
            return
        ends = Counter(_ends(view))
        room = self._policy.migrations_at_once - sum(ends.values()) // 2
        if room <= 0:
            return
        balanced: dict[str, str] = {}
        """Worker that serves several classes → the class of which a session migrates to or from it."""
        there = cluster()
        guard = QuotaGuard(there)
        for proposed in self._rebalancer.propose(there, now):
            migration = migration_of_workers(proposed)
            drains = migration.kind is MigrationKind.DRAIN
            if not drains and (waiting or not self._policy.rebalance):
                continue
            session = view.sessions[migration.session]
            model = session.record.model
            pair = (migration.source, migration.target)
            if room <= 0 or any(ends[name] >= self._policy.migrations_per_worker for name in pair):
                continue
            if session.record.phase.holds_slot and is_full(view, migration.target, session):
                continue
            # The classes of a worker are balanced apart, and each would count the whole gain for itself.
            if not drains and any(balanced.get(name, model) != model for name in pair):
                continue
            if not drains and guard.refuses(proposed):
                continue
            guard.begun(proposed)
            if not drains:
                balanced |= dict.fromkeys(several_of(view, pair), model)
            room -= 1
            ends.update(pair)
            numbers = {**migration.numbers, "gain_s": migration.gain_s, "cost_s": migration.cost_s}
            begin = self.begin(view, session, migration.target, _reason(migration), numbers, take)
            session.rebalanced_to = None if drains else migration.target
            yield begin

    @staticmethod
    def begin(
        view: View, session: SessionView, target: str, reason: str, numbers: Mapping[str, float], take: Take
    ) -> BeginMigration:
        """Begin a migration. A session that holds a slot gets one reserved at the target."""
        record = session.record
        session.rebalanced_to = None
        view.begin_migration(session, target)
        decision = Decision(
            session=session.id,
            epoch=record.epoch,
            worker=target,
            kind="migrate",
            reason=reason,
            numbers=dict(numbers),
        )
        return BeginMigration(take(session), record.version, decision)


def _reason(migration: Migration) -> str:
    return f"{migration.kind.value}: {migration.reason}"


def _report(view: View, record: SessionRecord) -> MigrationReport | None:
    """Return the target's last report about the migration in `record`; None if there is none."""
    target = view.workers.get(record.target or "")
    report = None if target is None else target.arrivals.get(record.id)
    return report if report is not None and report.migration == record.migration else None


def _ends(view: View) -> Iterator[str]:
    """Yield source and target of every migration that is under way or about to begin."""
    for name in view.migrating | view.beginning:
        session = view.sessions[name]
        yield from (session.record.worker or "", session.record.target or session.begun_to or "")
