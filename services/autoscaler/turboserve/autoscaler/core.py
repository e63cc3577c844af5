"""The pool's core: keeps the wanted number of members. Events in, commands out; no clock, no I/O.

The core acts only on positive evidence. It ends a drained worker only after the store, asked after the drain
was accepted, has reported that the worker holds no sessions. Silence and failed requests change nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from turboserve.autoscaler.command_tracker import ActionRecord, CommandTracker, GoneNotifier
from turboserve.autoscaler.lifecycle import Lifecycle, Policy, may_be_drained
from turboserve.autoscaler.messages import (
    Command,
    DeclareGone,
    Done,
    Drain,
    Event,
    Exited,
    Failed,
    ListProviderWorkers,
    ListWorkers,
    LoadReported,
    ProviderWorkersListed,
    RunningWorker,
    SizesWanted,
    SizeWanted,
    Tick,
    WorkersListed,
)
from turboserve.autoscaler.pool_members import (
    LARGEST,
    RESERVED_OFFER,
    PoolMember,
    end_waits,
    fit,
    member_name,
    parts_of,
    switch,
)
from turboserve.contracts.pool import PoolMemberPhase
from turboserve.contracts.workers import WorkerPhase, WorkerRecord


class Pool:
    """State of one pool. `new_worker` returns a worker id that was never used before."""

    def __init__(self, name: str, new_worker: Callable[[], str], policy: Policy | None = None) -> None:
        self.name = name
        self.policy = policy or Policy()
        self.target = 0
        self.sizes: dict[str, int] = {"": 0}
        """Wanted number of workers by offer. Their sum is `target`."""
        self.members: dict[str, PoolMember] = {}
        self.rows: dict[str, WorkerRecord] = {}
        """The store's workers, as last listed."""
        self.leaving: frozenset[str] = frozenset()
        """Workers that drained before this core began. Adopted, they do not count as wanted."""
        self.adopted = False
        """Whether the provider has listed its workers. The core starts no worker before that."""
        self.doubt: str | None = None
        """What is wrong with the provider's last list of workers; None if nothing is."""
        self.store_doubt: str | None = None
        """What is wrong with the store's last list of workers; None if nothing is."""
        self._tracker = CommandTracker()
        self._gone = GoneNotifier(self.policy.retry_s)
        self._life = Lifecycle(self._tracker, self._gone, self.policy, new_worker)
        self._asked: dict[type[ListProviderWorkers] | type[ListWorkers], int] = {}
        self._asked_at: dict[type[ListProviderWorkers] | type[ListWorkers], float] = {}
        self._drained = False
        """Whether a worker may have drained since the store was last asked."""
        self._orphans: dict[str, int] = {}
        """Rows that name this pool and have no pool member: worker → stamp when first seen."""
        self._orphan_reported_at: dict[str, float] = {}

    @property
    def actions(self) -> deque[ActionRecord]:
        """The last actions, newest last."""
        return self._tracker.actions

    def handle(self, event: Event, now: float) -> list[Command]:
        """Process one event at monotonic time `now` (seconds); returns the commands to run, in order.

        Raises ValueError for a size outside 0 to `LARGEST`.
        """
        match event:
            case SizeWanted(size, reason):
                self._resize(size, reason, now)
            case SizesWanted(sizes, reason, switches):
                self._resize_offers(sizes, reason, now)
                if self.adopted:
                    switch(self.members, sizes, switches, self.name, now)
            case ProviderWorkersListed():
                self._provider_workers_listed(event, now)
            case WorkersListed():
                self._workers_listed(event, now)
            case LoadReported(report):
                member = self._member_of(report.worker)
                if member is not None:
                    member.heard(report, now)
                    self._life.worker_reported(member, report.phase, now)
                    self._drained |= may_be_drained(member, report)
                elif report.worker in self._orphans:
                    self._orphan_reported_at[report.worker] = now
            case Exited(worker, status):
                self._exited(worker, status, now)
            case Done() | Failed():
                self._answered(event, now)
            case Tick():
                pass
        self._advance(now)
        return self._tracker.collect()

    def owns(self, member: str) -> bool:
        """Whether the pool member name `member` belongs to this pool."""
        return member.startswith(f"{self.name}-")

    def _resize(self, size: int, reason: str, now: float) -> None:
        if not 0 <= size <= LARGEST:
            raise ValueError(f"size: {size} is not within 0 to {LARGEST}")
        if size != self.target:
            self._tracker.act(now, "target", f"{self.target} → {size}: {reason}")
            self.target, self.sizes = size, {"": size}

    def _resize_offers(self, sizes: Mapping[str, int], reason: str, now: float) -> None:
        target = sum(sizes.values())
        if target > LARGEST or any(size < 0 for size in sizes.values()):
            raise ValueError(f"sizes: {dict(sizes)} are not within 0 to {LARGEST} in all")
        changes = [
            f"{offer} {self.sizes.get(offer, 0)} → {size}"
            for offer, size in sizes.items()
            if size != self.sizes.get(offer, 0)
        ]
        if changes:
            self._tracker.act(now, "target", f"{', '.join(changes)}: {reason}")
        self.target, self.sizes = target, dict(sizes)

    # The provider's workers

    def _provider_workers_listed(self, event: ProviderWorkersListed, now: float) -> None:
        if self._tracker.answered(event.ticket) is None:
            return
        self._asked.pop(ListProviderWorkers, None)
        living = {provider_worker.worker for provider_worker in event.provider_workers}
        self.doubt, lately = None, now - self.policy.report_timeout_s
        for member in list(self.members.values()):
            if member.worker is None or member.worker in living or not member.is_up_since(event.ticket):
                continue
            if member.phase is not PoolMemberPhase.RELEASING and member.has_reported(lately):
                # Do not trust a list without a worker that reports: its sessions would end. The provider
                # reports real exits separately.
                self.doubt = f"list without {member.worker} of {member.name}, which reports; list ignored"
                continue
            self._exited(member.worker, "the provider does not list it any more", now)
        for provider_worker in sorted(event.provider_workers, key=lambda m: (m.member, m.worker)):
            # The listing may be older than an exit that is known already.
            if self._member_of(provider_worker.worker) is None and not self._gone.gone_after(
                provider_worker.worker, event.ticket
            ):
                self._adopt(provider_worker, now)
        for worker, seen in self._orphans.items():
            if seen >= event.ticket or worker in living:
                continue
            if self._orphan_reported_at.get(worker, -math.inf) > lately:
                self.doubt = f"list without {worker}, which reports; list ignored"
                continue
            self._gone.add(worker, "no such process in the pool", self._tracker.stamp())
        self.adopted = True

    def _adopt(self, provider_worker: RunningWorker, now: float) -> None:
        taken = self.members.get(provider_worker.member)
        parts = parts_of(provider_worker.member, self.name)
        # A member that waits for its next attempt is free: a former leader may have started this worker.
        free = PoolMemberPhase.VACANT, PoolMemberPhase.BACKING_OFF
        double = taken is not None and (taken.worker is not None or taken.phase not in free)
        surplus = double or parts is None or parts[0] not in self.sizes
        if parts is None or surplus:
            # A pool member holds one worker. The extra worker may hold sessions, so drain it like any other.
            name = member_name(self.name, RESERVED_OFFER, provider_worker.worker)
            member = PoolMember(name, LARGEST, "" if parts is None else parts[0], wanted=False)
        else:
            member = taken or PoolMember(provider_worker.member, parts[1], parts[0])
        member.occupy(provider_worker.worker, now, adopted=True)
        member.drain_requested = surplus
        if provider_worker.worker in self.leaving:
            # Its own report may come after those of the others, and one of these would drain in its place.
            member.wanted, member.drain_requested, member.found_draining = False, True, True
        member.pid, member.up_since = provider_worker.pid, self._tracker.stamp()
        member.enter(PoolMemberPhase.LAUNCHING, now, "process found, waiting for its first report")
        self.members[member.name] = member
        self._tracker.act(now, "adopt", "its process runs already", member)

    def _exited(self, worker: str, status: str, now: float) -> None:
        member = self._member_of(worker)
        ended_by_us = member is not None and member.phase is PoolMemberPhase.RELEASING
        reason = member.reason if member is not None and ended_by_us else status
        self._gone.add(worker, reason, self._tracker.stamp())
        if member is not None and not ended_by_us:
            self._life.exited(member, status, now)

    # The store's rows

    def _workers_listed(self, event: WorkersListed, now: float) -> None:
        if self._tracker.answered(event.ticket) is None:
            return
        self._asked.pop(ListWorkers, None)
        self.rows = {record.id: record for record in event.workers}
        self.store_doubt = None
        for member in list(self.members.values()):
            if member.worker is None:
                continue
            row = self.rows.get(member.worker)
            if row is not None:
                self._row_of(member, row, event.ticket, now)
            if member.release_failed is not None and member.release_failed < event.ticket:
                member.release_failed = None
            if self._life.is_late(member, row, self._asked_at[ListWorkers]):
                self._life.replace_late(member, row, now)
            elif row is None and member.has_vanished(event.ticket):
                member.declared_gone = True
                self._life.fail(member, "the state store no longer has it", now)
        ours = [r.id for r in event.workers if r.pool_member is not None and self.owns(r.pool_member)]
        orphans = [worker for worker in ours if self._member_of(worker) is None]
        if any(worker not in self._orphans for worker in orphans):
            # Sessions of dead workers wait, so ask the provider at once which of these workers live.
            self._asked_at.pop(ListProviderWorkers, None)
        self._orphans = {worker: self._orphans.get(worker, self._tracker.stamp()) for worker in orphans}
        self._orphan_reported_at = {w: at for w, at in self._orphan_reported_at.items() if w in self._orphans}

    def _row_of(self, member: PoolMember, row: WorkerRecord, ticket: int, now: float) -> None:
        member.listed = True
        member.sessions, member.suspended, member.incoming = row.sessions, row.suspended, row.incoming
        member.classes = row.classes
        if row.phase is WorkerPhase.READY:
            member.capacity = row.capacity
        self._life.worker_reported(member, row.phase, now)
        drained = member.drained_since is not None and ticket > member.drained_since
        if member.phase is PoolMemberPhase.DRAINING and drained and row.phase is not WorkerPhase.DRAINING:
            # The worker's process was restarted under its id, and the drain ended with the old process.
            member.drained_since = None
        elif member.phase is PoolMemberPhase.DRAINING and drained and member.held == 0:
            self._life.release(member, member.replaced or "drained", now)

    # Outcomes of commands, and next steps

    def _answered(self, event: Done | Failed, now: float) -> None:
        command = self._tracker.answered(event.ticket)
        match command:
            case None:
                pass
            case ListProviderWorkers() | ListWorkers():
                self._asked.pop(type(command), None)
                reason = event.reason if isinstance(event, Failed) else "no list"
                if isinstance(command, ListProviderWorkers):
                    self.doubt = f"no list of workers: {reason}"
                else:
                    self.store_doubt = reason
            case DeclareGone(worker=worker):
                self._gone.answered(worker, isinstance(event, Done) or event.missing, now)
            case _:
                member = self.members.get(command.member)
                if member is not None and member.ticket == event.ticket:
                    member.ticket = None
                    self._life.settle(member, command, event, now)
                    if isinstance(command, Drain) and isinstance(event, Done):
                        self._drained |= member.held == 0

    def _advance(self, now: float) -> None:
        if self.adopted:
            for offer, size in self.sizes.items():
                fit(self.members, size, self.name, now, offer)
            for member in list(self.members.values()):
                self._life.step(member, now)
                if member.phase is PoolMemberPhase.VACANT and not (member.wanted and member.waits_for):
                    # The member is not wanted; a wanted one would be RESERVING after the step.
                    del self.members[member.name]
            for member in end_waits(self.members):
                self._life.step(member, now)
        self._ask(ListProviderWorkers, now)
        self._ask(ListWorkers, now)
        for worker, reason in self._gone.due(now):
            self._tracker.send(DeclareGone(self._tracker.stamp(), worker, reason))

    def _ask(self, question: type[ListProviderWorkers] | type[ListWorkers], now: float) -> None:
        last, rows = self._asked_at.get(question), question is ListWorkers
        interval_s = self.policy.drained_list_s if rows and self._drained else self.policy.list_s
        if question in self._asked or (last is not None and now - last < interval_s):
            return
        self._drained = self._drained and not rows
        self._asked[question], self._asked_at[question] = self._tracker.stamp(), now
        self._tracker.send(question(self._asked[question]))

    def workers(self) -> list[str]:
        """Return the ids of the workers in pool members."""
        return [member.worker for member in self.members.values() if member.worker is not None]

    def _member_of(self, worker: str) -> PoolMember | None:
        return next((member for member in self.members.values() if member.worker == worker), None)
