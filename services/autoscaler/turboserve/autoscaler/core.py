"""The pool's core: keeps the wanted number of slots filled. Events in, commands out; no clock, no I/O.

It acts on positive evidence only: a worker is ended after the store, asked after the drain was accepted, has
said that it holds nothing; silence and failed questions change nothing (the design, "Scheduling").
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from turboserve.autoscaler.desk import Action, Desk
from turboserve.autoscaler.lifecycle import Lifecycle
from turboserve.autoscaler.messages import (
    Command,
    DeclareGone,
    Done,
    Event,
    Exited,
    Failed,
    Listed,
    ListMembers,
    ListWorkers,
    Living,
    LoadReported,
    SizeWanted,
    Tick,
    WorkersListed,
)
from turboserve.autoscaler.obituaries import Obituaries
from turboserve.autoscaler.policy import Policy
from turboserve.autoscaler.sizing import LARGEST, fit
from turboserve.autoscaler.slots import Slot
from turboserve.contracts.pool import SlotPhase
from turboserve.contracts.workers import WorkerPhase, WorkerRecord


class Pool:
    """State of one pool. `new_worker` gives a worker id that was never used before."""

    def __init__(self, name: str, new_worker: Callable[[], str], policy: Policy | None = None) -> None:
        self.name = name
        self.policy = policy or Policy()
        self.target = 0
        self.slots: dict[str, Slot] = {}
        self.rows: dict[str, WorkerRecord] = {}
        """The store's workers, as last listed."""
        self.adopted = False
        """Whether the provider has said what lives; nothing is started before."""
        self.doubt: str | None = None
        """What is wrong with the provider's last answer to what lives; None: nothing."""
        self.store_doubt: str | None = None
        """As `doubt`, of the store's answer to which workers are there."""
        self._desk = Desk()
        self._obituaries = Obituaries(self.policy.retry_s)
        self._life = Lifecycle(self._desk, self._obituaries, self.policy, new_worker)
        self._asked: dict[type[ListMembers] | type[ListWorkers], int] = {}
        self._asked_at: dict[type[ListMembers] | type[ListWorkers], float] = {}
        self._orphans: dict[str, int] = {}
        """Rows that say they are in this pool and have no slot: worker → stamp when first seen."""
        self._orphan_spoke_at: dict[str, float] = {}

    @property
    def actions(self) -> deque[Action]:
        """What was done last, newest last."""
        return self._desk.actions

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event at monotonic time `now`; returns what to do, in order.

        Raises ValueError for a size that no pool can have.
        """
        match event:
            case SizeWanted(size, reason):
                self._resize(size, reason, now)
            case Listed():
                self._members_listed(event, now)
            case WorkersListed():
                self._workers_listed(event, now)
            case LoadReported(report):
                slot = self._slot_of(report.worker)
                if slot is not None:
                    slot.spoke_at = now
                    self._life.heard(slot, report.phase, now)
                elif report.worker in self._orphans:
                    self._orphan_spoke_at[report.worker] = now
            case Exited(worker, status):
                self._exited(worker, status, now)
            case Done() | Failed():
                self._answered(event, now)
            case Tick():
                pass
        self._advance(now)
        return self._desk.collect()

    def owns(self, slot: str) -> bool:
        """Whether a worker that says it runs in `slot` is one of this pool's."""
        return slot.startswith(f"{self.name}-")

    def _resize(self, size: int, reason: str, now: float) -> None:
        if not 0 <= size <= LARGEST:
            raise ValueError(f"size: {size} is not within 0 to {LARGEST}")
        if size != self.target:
            self._desk.act(now, "target", f"{self.target} → {size}: {reason}")
            self.target = size

    # What the provider has

    def _members_listed(self, event: Listed, now: float) -> None:
        if self._desk.answered(event.ticket) is None:
            return
        self._asked.pop(ListMembers, None)
        living = {member.worker for member in event.members}
        self.doubt, lately = None, now - self.policy.spoke_s
        for slot in list(self.slots.values()):
            if slot.worker is None or slot.worker in living or not slot.is_up_since(event.ticket):
                continue
            if slot.phase is not SlotPhase.RELEASING and slot.has_spoken(lately):
                # A list that leaves out the living would end their sessions. Exits are told by themselves.
                self.doubt = f"its list has no {slot.worker} in {slot.name}, who speaks: not believed"
                continue
            self._exited(slot.worker, "it is not there any more", now)
        for member in sorted(event.members, key=lambda m: (m.slot, m.worker)):
            # A listing may be older than an end we know of.
            if self._slot_of(member.worker) is None and not self._obituaries.died_after(
                member.worker, event.ticket
            ):
                self._adopt(member, now)
        for worker, seen in self._orphans.items():
            if seen >= event.ticket or worker in living:
                continue
            if self._orphan_spoke_at.get(worker, -math.inf) > lately:
                self.doubt = f"its list has no {worker}, who speaks: not believed"
                continue
            self._obituaries.add(worker, "no such process in the pool", self._desk.stamp())
        self.adopted = True

    def _adopt(self, member: Living, now: float) -> None:
        taken = self.slots.get(member.slot)
        number = member.slot.removeprefix(f"{self.name}-")
        double = not number.isdigit() or (
            taken is not None and (taken.worker is not None or taken.phase is not SlotPhase.VACANT)
        )
        if double:
            # One slot cannot have two. It may hold sessions, so it is drained like any other.
            slot = Slot(f"{self.name}-extra-{member.worker}", LARGEST, wanted=False)
        else:
            slot = taken or Slot(member.slot, int(number))
        slot.occupy(member.worker, now, adopted=True)
        slot.sealed = double
        slot.pid, slot.up_since = member.pid, self._desk.stamp()
        slot.enter(SlotPhase.LAUNCHING, now, "found alive, waiting to hear from it")
        self.slots[slot.name] = slot
        self._desk.act(now, "adopt", f"process {member.pid} was there already", slot)

    def _exited(self, worker: str, status: str, now: float) -> None:
        slot = self._slot_of(worker)
        ended_by_us = slot is not None and slot.phase is SlotPhase.RELEASING
        reason = slot.reason if slot is not None and ended_by_us else status
        self._obituaries.add(worker, reason, self._desk.stamp())
        if slot is not None and not ended_by_us:
            self._life.exited(slot, status, now)

    # What the store has

    def _workers_listed(self, event: WorkersListed, now: float) -> None:
        if self._desk.answered(event.ticket) is None:
            return
        self._asked.pop(ListWorkers, None)
        self.rows = {record.id: record for record in event.workers}
        self.store_doubt = None
        for slot in list(self.slots.values()):
            if slot.worker is None:
                continue
            row = self.rows.get(slot.worker)
            if row is not None:
                self._row_of(slot, row, event.ticket, now)
            if self._life.is_late(slot, row, self._asked_at[ListWorkers]):
                self._life.fail(slot, f"not ready within {self.policy.ready_timeout_s:g} s", now)
            elif row is None and slot.has_vanished(event.ticket):
                self._life.fail(slot, "the state store does not know it any more", now)
        ours = [r.id for r in event.workers if r.pool_slot is not None and self.owns(r.pool_slot)]
        orphans = [worker for worker in ours if self._slot_of(worker) is None]
        if any(worker not in self._orphans for worker in orphans):
            # Their sessions wait: the provider is asked at once whether they live.
            self._asked_at.pop(ListMembers, None)
        self._orphans = {worker: self._orphans.get(worker, self._desk.stamp()) for worker in orphans}
        self._orphan_spoke_at = {w: at for w, at in self._orphan_spoke_at.items() if w in self._orphans}

    def _row_of(self, slot: Slot, row: WorkerRecord, ticket: int, now: float) -> None:
        slot.listed = True
        slot.sessions, slot.suspended, slot.incoming = row.sessions, row.suspended, row.incoming
        self._life.heard(slot, row.phase, now)
        drained = slot.drained_since is not None and ticket > slot.drained_since
        if slot.phase is SlotPhase.DRAINING and drained and row.phase is not WorkerPhase.DRAINING:
            # Its process was started again under its id, and the drain ended with the one before.
            slot.drained_since = None
        elif slot.phase is SlotPhase.DRAINING and drained and slot.held == 0:
            self._life.release(slot, "drained", now)

    # What became of commands, and what is next

    def _answered(self, event: Done | Failed, now: float) -> None:
        command = self._desk.answered(event.ticket)
        match command:
            case None:
                pass
            case ListMembers() | ListWorkers():
                self._asked.pop(type(command), None)
                reason = event.reason if isinstance(event, Failed) else "no list"
                if isinstance(command, ListMembers):
                    self.doubt = f"it does not say what lives: {reason}"
                else:
                    self.store_doubt = reason
            case DeclareGone(worker=worker):
                heard = isinstance(event, Done) or event.missing
                self._obituaries.answered(worker, heard, now)
            case _:
                slot = self.slots.get(command.slot)
                if slot is not None and slot.ticket == event.ticket:
                    slot.ticket = None
                    self._life.settle(slot, command, event, now)

    def _advance(self, now: float) -> None:
        if self.adopted:
            fit(self.slots, self.target, self.name, now)
            for slot in list(self.slots.values()):
                self._life.step(slot, now)
                if slot.phase is SlotPhase.VACANT:
                    # Not wanted, or it would be reserving by now.
                    del self.slots[slot.name]
        self._ask(ListMembers, now)
        self._ask(ListWorkers, now)
        for worker, reason in self._obituaries.due(now):
            self._desk.send(DeclareGone(self._desk.stamp(), worker, reason))

    def _ask(self, question: type[ListMembers] | type[ListWorkers], now: float) -> None:
        last = self._asked_at.get(question)
        if question in self._asked or (last is not None and now - last < self.policy.list_s):
            return
        self._asked[question], self._asked_at[question] = self._desk.stamp(), now
        self._desk.send(question(self._asked[question]))

    def workers(self) -> list[str]:
        """Ids of the workers that are in slots."""
        return [slot.worker for slot in self.slots.values() if slot.worker is not None]

    def _slot_of(self, worker: str) -> Slot | None:
        return next((slot for slot in self.slots.values() if slot.worker == worker), None)
