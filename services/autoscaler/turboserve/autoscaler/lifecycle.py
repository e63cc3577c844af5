"""The life cycle of a pool member's worker: reports, outcomes of commands, and the next command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turboserve.autoscaler.command_tracker import CommandTracker, GoneNotifier
from turboserve.autoscaler.messages import Command, Done, Drain, Failed, Launch, Release, Reserve
from turboserve.autoscaler.pool_members import KEEPABLE, PoolMember
from turboserve.backoff import backoff_s
from turboserve.contracts.pool import PoolMemberPhase
from turboserve.contracts.workers import LoadReport, WorkerPhase, WorkerRecord
from turboserve.wording import counted

_READY = PoolMemberPhase.READY


@dataclass(frozen=True)
class Policy:
    """Times of the pool's core, in seconds."""

    ready_timeout_s: float = 120.0
    """A worker that is not ready this long after its launch is drained, ended and replaced."""
    drain_deadline_s: float = 600.0
    """A drain that takes longer is reported and continues. It never ends a worker that holds sessions."""
    stable_s: float = 30.0
    """If a worker fails after it was ready for this long, the count of failures starts again at one."""
    backoff_s: float = 0.5
    backoff_limit_s: float = 30.0
    list_s: float = 2.0
    """Interval at which the store and the provider are asked for their workers."""
    drained_list_s: float = 0.25
    """Least interval between two questions to the store while a worker may have drained: it is paid for until
    the store's answer."""
    retry_s: float = 1.0
    report_timeout_s: float = 5.0
    """A worker with a report within this time is alive, even if the provider's list leaves it out."""

    def backoff(self, failures: int) -> float:
        """Return the wait in seconds after `failures` failures in a row: 0 after the first, then doubling."""
        return backoff_s(failures - 1, self.backoff_s, self.backoff_limit_s)


def may_be_drained(member: PoolMember, report: LoadReport) -> bool:
    """Whether the member's worker, whose drain is accepted, reports that it holds nothing any more.

    Only the store's row shows that it has drained: a session may be on its way to the worker.
    """
    accepted = member.phase is PoolMemberPhase.DRAINING and member.drained_since is not None
    return accepted and not (report.sessions or report.migrations)


class Lifecycle:
    """Takes pool members through reserve, launch, load, ready, drain and release (TurboServe, 6.2)."""

    def __init__(
        self, tracker: CommandTracker, gone: GoneNotifier, policy: Policy, new_worker: Callable[[], str]
    ) -> None:
        self._tracker, self._gone_notifier, self._policy = tracker, gone, policy
        self._new_worker = new_worker

    # Reports

    def worker_reported(self, member: PoolMember, phase: WorkerPhase, now: float) -> None:
        """Apply the phase that the member's worker, or its row, reports."""
        if member.phase is PoolMemberPhase.LAUNCHING and phase is WorkerPhase.STARTING:
            member.enter(PoolMemberPhase.LOADING, now, "registered, loading its model")
        elif (
            member.phase in (PoolMemberPhase.LAUNCHING, PoolMemberPhase.LOADING)
            and phase is WorkerPhase.READY
        ):
            took_s = now - member.launched_at
            member.enter(PoolMemberPhase.READY, now, f"ready {took_s:.1f} s after its launch")
            member.ready_at = now
            self._tracker.act(now, "ready", member.reason, member)
        elif phase is WorkerPhase.DRAINING and member.phase in KEEPABLE:
            # A drain was requested, perhaps by this service before a restart. A drain cannot be canceled.
            member.wanted, member.drain_requested = False, True
            if member.phase is PoolMemberPhase.LAUNCHING:
                member.enter(PoolMemberPhase.LOADING, now, "registered, draining")
        elif (
            phase in (WorkerPhase.STARTING, WorkerPhase.READY)
            and member.phase is PoolMemberPhase.RELEASING
            and member.ticket is None
            and not member.declared_gone
        ):
            # Its release has failed, and it may have got sessions meanwhile.
            self._begin_drain(member, f"still runs, {member.reason}", now)

    def is_late(self, member: PoolMember, row: WorkerRecord | None, asked_at: float) -> bool:
        """Whether the store, asked after the time-out, shows that the worker is still not ready.

        Missing reports alone are no reason: only this service may be disconnected while the worker serves.
        """
        return (
            member.phase in (PoolMemberPhase.LAUNCHING, PoolMemberPhase.LOADING)
            and asked_at - member.launched_at >= self._policy.ready_timeout_s
            and (row is None or row.phase is WorkerPhase.STARTING)
        )

    def replace_late(self, member: PoolMember, row: WorkerRecord | None, now: float) -> None:
        """Replace a worker that is not ready in time (`is_late`).

        A registered worker may become ready at any moment, and get sessions. So it drains first.
        """
        reason = f"not ready within {self._policy.ready_timeout_s:g} s"
        if row is None:
            self.fail(member, reason, now)
            return
        self._failed(member, reason, now)
        self._begin_drain(member, reason, now)

    def exited(self, member: PoolMember, status: str, now: float) -> None:
        """Handle the end of the member's worker that this pool did not request."""
        self._tracker.act(now, "gone", status, member)
        self._count_failure(member, now)
        member.vacate()
        if member.wanted:
            member.enter(PoolMemberPhase.BACKING_OFF, now, status)
        else:
            self.release(member, status, now)

    def fail(self, member: PoolMember, reason: str, now: float) -> None:
        """End the member's worker after a failure. A wanted member launches another one later."""
        self._failed(member, reason, now)
        self.release(member, reason, now)

    def _failed(self, member: PoolMember, reason: str, now: float) -> None:
        self._tracker.act(now, "fail", reason, member)
        self._count_failure(member, now)
        member.replaced = reason

    def _count_failure(self, member: PoolMember, now: float) -> None:
        if member.ready_at is not None and now - member.ready_at >= self._policy.stable_s:
            member.failures = 0
        member.failures += 1
        member.retry_at = now + self._policy.backoff(member.failures)

    # Outcomes of commands

    def settle(self, member: PoolMember, command: Command, event: Done | Failed, now: float) -> None:
        """Apply the outcome of the member's command."""
        match command, event:
            case Reserve(), Done():
                member.reserved = True
                self._launch(member, now)
            case Reserve(), Failed(reason=reason):
                self._tracker.act(now, "fail", f"reserve: {reason}", member)
                self._count_failure(member, now)
                member.enter(PoolMemberPhase.BACKING_OFF, now, f"reserve: {reason}")
            case Launch(), Done(pid=pid):
                member.pid, member.up_since = pid, self._tracker.stamp()
            case Launch(), Failed(reason=reason, missing=True):
                self.exited(member, f"launch: {reason}", now)
            case Launch(), Failed(reason=reason):
                # The worker may have started nevertheless. The provider's next listing shows that.
                member.reason, member.up_since = f"launch: {reason}", self._tracker.stamp()
            case Drain(), Done():
                member.drained_since = self._tracker.stamp()
            case Drain(), Failed(missing=True):
                self.fail(member, "the state store does not know it", now)
            case Drain(), Failed(reason=reason):
                member.reason, member.retry_at = f"drain: {reason}", now + self._policy.retry_s
            case Release(), Done():
                self._released(member, now)
            case Release(worker=worker), Failed(reason=reason):
                member.reason, member.retry_at = f"release: {reason}", now + self._policy.retry_s
                if worker is not None and member.drained_since is None and not member.declared_gone:
                    member.release_failed = self._tracker.stamp()
            case _:
                pass

    def _released(self, member: PoolMember, now: float) -> None:
        if member.worker is not None:
            self._gone_notifier.add(member.worker, member.reason, self._tracker.stamp())
        member.vacate()
        member.reserved = False
        if member.wanted:
            member.enter(PoolMemberPhase.BACKING_OFF, now, member.reason)
        else:
            member.enter(PoolMemberPhase.VACANT, now, member.reason)

    # Next steps

    def step(self, member: PoolMember, now: float) -> None:
        """Take the member's next step, if one is due."""
        if member.phase is _READY and member.wanted:
            # Nearly always.
            return
        match member.phase:
            case PoolMemberPhase.VACANT if member.wanted and member.waits_for is None:
                member.enter(PoolMemberPhase.RESERVING, now, "the pool wants a worker here")
                self._tracker.send(Reserve(self._tracker.take(member), member.name))
            case PoolMemberPhase.BACKING_OFF if not member.wanted:
                self.release(member, "no longer wanted", now)
            case PoolMemberPhase.BACKING_OFF if member.retry_at <= now and member.reserved:
                self._launch(member, now)
            case PoolMemberPhase.BACKING_OFF if member.retry_at <= now:
                member.enter(PoolMemberPhase.RESERVING, now, "retrying")
                self._tracker.send(Reserve(self._tracker.take(member), member.name))
            case PoolMemberPhase.LOADING | PoolMemberPhase.READY if not member.wanted:
                # Do not drain from LAUNCHING: a worker that is just registering could get sessions meanwhile.
                self._begin_drain(member, "no longer wanted", now)
            case PoolMemberPhase.DRAINING:
                self._drain(member, now)
            case PoolMemberPhase.RELEASING if member.ticket is None and member.retry_at <= now:
                if member.release_failed is None:
                    self._send_release(member)
            case _:
                pass

    def _launch(self, member: PoolMember, now: float) -> None:
        member.occupy(self._new_worker(), now)
        member.enter(PoolMemberPhase.LAUNCHING, now, "started, waiting for its first report")
        assert member.worker is not None
        self._tracker.act(now, "launch", f"attempt {member.failures + 1}", member)
        self._tracker.send(Launch(self._tracker.take(member), member.name, member.worker))

    def _begin_drain(self, member: PoolMember, reason: str, now: float) -> None:
        member.enter(PoolMemberPhase.DRAINING, now, reason)
        member.drained_since = None
        member.drain_deadline, member.retry_at = now + self._policy.drain_deadline_s, now
        self._tracker.act(now, "drain", reason, member)
        self._drain(member, now)

    def _drain(self, member: PoolMember, now: float) -> None:
        if member.drained_since is None and member.ticket is None and member.retry_at <= now:
            assert member.worker is not None
            self._tracker.send(Drain(self._tracker.take(member), member.name, member.worker))
        if now >= member.drain_deadline:
            member.drain_deadline = now + self._policy.drain_deadline_s
            suspended = counted(member.suspended, "suspended one")
            held = f"still holds {counted(member.sessions, 'session')} and {suspended}"
            waits = held if member.drained_since is not None else f"not accepted yet ({member.reason})"
            member.reason = f"{waits}; deadline extended"
            self._tracker.act(now, "extend", member.reason, member)

    def release(self, member: PoolMember, reason: str, now: float) -> None:
        """End the member's worker, if there is one, and give its resources back."""
        member.enter(PoolMemberPhase.RELEASING, now, reason)
        self._tracker.act(now, "release", reason, member)
        # The new ticket replaces that of any command under way, so its answer is ignored.
        self._send_release(member)

    def _send_release(self, member: PoolMember) -> None:
        ticket = self._tracker.take(member)
        self._tracker.send(Release(ticket, member.name, member.worker, member.reason, member.declared_gone))
