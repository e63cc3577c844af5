"""Decides which sessions get slots, which ones are suspended and which workers are declared gone.

It also applies the outcomes of commands and the refusals of workers to the view. If an outcome is in doubt,
the row is read again.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from turboserve.contracts.sessions import Activity, Decision, Phase
from turboserve.contracts.workers import LoadReport, WorkerPhase
from turboserve.scheduler.messages import (
    Answered,
    BeginMigration,
    CommitMigration,
    DeclareGone,
    OfSession,
    Place,
    Refused,
    SuspendIdle,
)
from turboserve.scheduler.placement import Choice, Demand
from turboserve.scheduler.policy import Policy
from turboserve.scheduler.session_view import InDoubt, Retry, SessionView, Settled, Share, Uncommittable
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_view import Declaring, Undeclared, WorkerView


def in_fair_order(
    sessions: Iterable[SessionView], slots: Mapping[Share, int], served: Mapping[Share, int]
) -> list[SessionView]:
    """Order the sessions for slots (weighted max-min fairness by tenant).

    Each next slot of a model goes to the tenant whose slots of that model cost least, including those that
    this order gives it (`SessionRecord.slot_cost`). Ties go to the tenant that got a slot longest ago, then
    to the tenant whose next session has waited longest. Within a tenant, the longest wait comes first; after
    a restart of the scheduler, the session that was created first.

    So of two tenants with waiting sessions of equal weights, neither gets ahead of the other by more than one
    slot, however many sessions wait. With one tenant, that is first come, first served.

    `slots`: costs of each tenant's slots, without those of `sessions`. `served`: number of each tenant's last
    placement; later placements have larger numbers. Cost: O(n log n).
    """
    queues: defaultdict[Share, list[SessionView]] = defaultdict(list)
    for session in sessions:
        queues[session.share].append(session)
    for queue in queues.values():
        queue.sort(key=_waited, reverse=True)
    heap = [
        (slots.get(share, 0), served.get(share, 0), _waited(queue[-1]), share)
        for share, queue in queues.items()
    ]
    heapq.heapify(heap)
    order: list[SessionView] = []
    newest = max(served.values(), default=0)
    while heap:
        count, _, _, share = heap[0]
        queue = queues[share]
        order.append(queue.pop())
        if queue:
            count += order[-1].record.slot_cost
            heapq.heapreplace(heap, (count, newest + len(order), _waited(queue[-1]), share))
        else:
            heapq.heappop(heap)
    return order


def in_slot_order(
    view: View, sessions: Sequence[SessionView], served: Mapping[Share, int]
) -> list[SessionView]:
    """Order sessions for slots: first those whose video was interrupted, then the others.

    `served`: see `in_fair_order`.
    """
    slots = Counter(view.slots_besides(sessions))
    interrupted = [session for session in sessions if session.record.phase.holds_slot]
    others = [session for session in sessions if not session.record.phase.holds_slot]
    first = in_fair_order(interrupted, slots, served)
    for session in first:
        slots[session.share] += session.record.slot_cost
    return first + in_fair_order(others, slots, served)


def _waited(session: SessionView) -> tuple[float, float, str]:
    since = 0.0 if session.waiting is None else session.waiting.since
    return since, session.record.created_at, session.id


def weights_needed(
    session: SessionView, served: Collection[tuple[str, str | None]], limit_s: float, now: float
) -> str | None:
    """Return the weights that made the session's chunks, or None if a worker with any weights will do.

    Any weights will do if:

    - the session has no chunks;
    - no worker in `served`, the pairs of model and weights of ready workers, has its weights;
    - the session has waited for `limit_s`.

    On other weights the session continues from its latents: its video may change its look, but it plays.
    """
    digest = session.record.weights_digest
    return digest if (session.record.model, digest) in served and session.waited_s(now) < limit_s else None


def demand_of(session: SessionView, kind: str, weights_digest: str | None, now: float) -> Demand:
    """Build the placement demand of a session. `weights_digest` comes from `weights_needed`."""
    record = session.record
    excluded = {worker for worker, (_, until) in session.refusals.items() if until > now}
    return Demand(
        session=session.id,
        model=record.model,
        kind=kind,
        holder=record.worker if record.phase is Phase.SUSPENDED else None,
        counted_on=record.worker if record.phase.holds_slot else None,
        excluded=frozenset(excluded),
        weights_digest=weights_digest,
    )


def _cause(session: SessionView, kind: str) -> str:
    if kind == "recover":
        return f"its worker {session.record.worker} is gone"
    if kind == "resume":
        return "its viewer has returned"
    if kind == "rebuild":
        return f"its worker {session.record.worker} is draining"
    if session.record.phase.holds_slot:
        return f"its worker {session.record.worker} refused it"
    return "new session"


def decision_of(session: SessionView, kind: str, choice: Choice, other_weights: bool, now: float) -> Decision:
    """Build the decision record of a choice.

    `other_weights`: the worker's weights differ from those that made the session's chunks.
    """
    return Decision(
        session=session.id,
        epoch=session.record.epoch + (choice.worker is not None),
        worker=choice.worker,
        kind="wait" if choice.worker is None else kind,
        reason=f"{_cause(session, kind)}: {choice.reason}"
        + (f"; no worker has its weights {session.record.weights_digest}" if other_weights else ""),
        numbers={**choice.numbers, "waited_s": session.waited_s(now)},
    )


def suspend_idle(
    view: View, policy: Policy, now: float, listened: float, take: Callable[[SessionView], int]
) -> Iterator[SuspendIdle]:
    """Suspend the sessions that have had no viewer for the policy's time. `listened`: listening time."""
    for session in view.sessions.values():
        record = session.record
        if (
            listened - session.watched_at >= policy.idle_after_s
            and record.activity is Activity.WATCHING
            and record.phase in (Phase.ACTIVE, Phase.REQUESTED)
            and session.may_change(now)
        ):
            yield SuspendIdle(take(session), session.id, record.version)


def declare_silent(view: View, policy: Policy, now: float, listened: float) -> Iterator[DeclareGone]:
    """Declare silent workers gone whose leases are over. `listened`: listening time."""
    for worker in view.workers.values():
        due = isinstance(worker.declaration, Undeclared) and worker.declaration.until <= now
        timeout_s = policy.silence_limit(worker.process.phase)
        if due and worker.is_dead(listened, timeout_s, policy.lease_s):
            worker.declaration = Declaring()
            reason = f"silent for {listened - worker.heard_at:.1f} s, limit {timeout_s:g} s"
            yield DeclareGone(view.stamp(), worker.id, reason, worker.renewed_at)


class PendingQuery:
    """One kind of listing. At most one is under way, and two are at least `least_s` apart."""

    def __init__(self, least_s: float) -> None:
        self.wanted = False
        self._least_s = least_s
        self._ticket: int | None = None
        self._asked_at: float | None = None
        self._asked_listening = 0.0

    def due(self, now: float) -> bool:
        rested = self._asked_at is None or now - self._asked_at >= self._least_s
        return self.wanted and self._ticket is None and rested

    def older_than(self, seconds: float, now: float) -> bool:
        """Whether the last listing was requested at least `seconds` ago; False if there was none."""
        return self._asked_at is not None and now - self._asked_at >= seconds

    def ask(self, ticket: int, now: float, listened: float) -> None:
        self.wanted = False
        self._ticket, self._asked_at, self._asked_listening = ticket, now, listened

    def answered(self, ticket: int) -> float | None:
        """End the listing; returns the listening time of its request, or None if `ticket` is another one."""
        if ticket != self._ticket:
            return None
        self._ticket = None
        return self._asked_listening


def settle_declaration(view: View, policy: Policy, command: DeclareGone, event: Answered, now: float) -> None:
    """Remove a worker that the store declared gone, or schedule another declaration."""
    worker = view.workers.get(command.worker)
    if event.refused in (None, Refused.NOT_FOUND, Refused.WORKER_GONE):
        view.drop_worker(command.worker)
    elif worker is not None:
        worker.declaration = Undeclared(until=now + policy.retry_s)


def settle_session(
    view: View,
    policy: Policy,
    session: SessionView,
    command: OfSession,
    event: Answered,
    now: float,
    listened: float,
) -> bool:
    """Apply the outcome of a session's command; returns whether the outcome calls for a full listing.

    The reservation remains until the row is known, because a command without an answer may have succeeded.
    """
    refused = event.refused
    surprised = False
    if event.record is not None:
        session.row_state, session.retry = Settled(), None
        if view.put_session(event.record, listened) is None:
            return False
        surprised = session.record.worker is not None and not view.knows(session.record.worker)
    elif refused is Refused.NOT_FOUND:
        view.drop_session(session.id)
        return False
    elif isinstance(command, Place | BeginMigration) and refused is Refused.NO_CAPACITY:
        surprised = True
        if command.worker in view.workers:
            view.workers[command.worker].full_until = now + policy.full_s
    elif isinstance(command, Place | BeginMigration | CommitMigration) and refused is Refused.WORKER_GONE:
        view.drop_worker(command.worker)
        # The store has ended all migrations to a gone worker, so the row has changed.
        if isinstance(command, CommitMigration):
            session.row_state = InDoubt()
    elif refused is Refused.STALE_STATE:
        if session.migration is not None:
            reason = "the log has a later chunk than the state that was copied"
            session.migration = Uncommittable(session.migration.migration, reason)
    else:
        if refused is not Refused.CONFLICT:
            failures = 1 if session.retry is None else session.retry.failures + 1
            session.retry = Retry(failures, not_before=now + policy.retry_after(failures))
        if refused is not Refused.NOT_SENT:
            session.row_state = InDoubt()
    if isinstance(command, SuspendIdle) and refused is not None:
        # The store may know of a viewer that the view does not, so the idle time starts again.
        session.watched_at = listened
    if not session.in_doubt:
        view.release(session)
    view.settle(session)
    return surprised


def note_refusals(view: View, policy: Policy, worker: WorkerView, report: LoadReport, now: float) -> None:
    """Apply the refusals in a worker's load report, and end those that the report no longer has."""
    for refusal in report.refusals:
        session = view.sessions.get(refusal.session)
        if (
            session is None
            or session.record.worker != report.worker
            or session.record.epoch != refusal.epoch
            or session.refused_epoch == refusal.epoch
        ):
            continue
        times = session.refusals.get(report.worker, (0, 0.0))[0] + 1
        session.refusals[report.worker] = (times, now + policy.rest_after(times))
        session.refused_epoch = refusal.epoch
        view.settle(session)
    if report.phase is not WorkerPhase.STARTING:
        _take_back(view, worker, report)


def _take_back(view: View, worker: WorkerView, report: LoadReport) -> None:
    """End refusals that are not in this report. A worker repeats each refusal in every report while it lasts.

    Do not call this for a worker that loads its model: a restarted worker may not have read its rows yet, so
    a missing refusal proves nothing.
    """
    refused = {(refusal.session, refusal.epoch) for refusal in report.refusals}
    for name in list(worker.used):
        session = view.sessions[name]
        epoch = session.refused_epoch
        if epoch is not None and session.record.worker == worker.id and (name, epoch) not in refused:
            session.refused_epoch = None
            view.settle(session)
