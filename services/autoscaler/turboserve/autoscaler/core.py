"""The pool's core: keeps `size` slots filled with workers. Events in, commands out; no clock, no I/O.

It acts on positive evidence only: a worker is ended after the store, asked after the drain was accepted, has
said that it holds nothing; silence and failed questions change nothing (the design, "Scheduling").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from turboserve.autoscaler.messages import (
    Command,
    DeclareGone,
    Done,
    Drain,
    Event,
    Exited,
    Failed,
    Launch,
    Listed,
    ListMembers,
    ListWorkers,
    LoadReported,
    Release,
    Reserve,
    SizeWanted,
    Tick,
    WorkersListed,
)
from turboserve.autoscaler.obituaries import Obituaries
from turboserve.autoscaler.slots import Slot
from turboserve.contracts.pool import SlotPhase
from turboserve.contracts.workers import WorkerPhase, WorkerRecord

LARGEST = 4_096
"""Workers in one pool, at most."""
ACTIONS_KEPT = 32


@dataclass(frozen=True)
class Policy:
    """The core's parameters, seconds."""

    ready_timeout_s: float = 120.0
    """A worker that is not ready this long after its launch is ended and replaced."""
    drain_deadline_s: float = 600.0
    """A drain that takes longer is reported and goes on; it never ends a worker that holds sessions."""
    stable_s: float = 30.0
    """A worker that has been ready this long was no failed start: the count of failures begins anew."""
    backoff_s: float = 0.5
    backoff_limit_s: float = 30.0
    list_s: float = 2.0
    """The store and the provider are asked this often."""
    retry_s: float = 1.0


@dataclass(frozen=True)
class Action:
    """One thing that was done, for operators."""

    at: float
    action: str
    reason: str
    slot: str | None = None
    worker: str | None = None


class Pool:
    """State of one pool. `new_worker` gives a worker id that was never used before."""

    def __init__(self, name: str, new_worker: Callable[[], str], policy: Policy | None = None) -> None:
        self.name = name
        self.policy = policy or Policy()
        self.target = 0
        self.slots: dict[str, Slot] = {}
        self.rows: dict[str, WorkerRecord] = {}
        """The store's workers, as last listed."""
        self.actions: deque[Action] = deque(maxlen=ACTIONS_KEPT)
        self.adopted = False
        """Whether the provider has said what lives; nothing is started before."""
        self._new_worker = new_worker
        self._obituaries = Obituaries(self.policy.retry_s)
        self._commands: list[Command] = []
        self._under_way: dict[int, Command] = {}
        self._asked: dict[type[Command], int] = {}
        self._asked_at: dict[type[Command], float] = {}
        self._orphans: dict[str, int] = {}
        """Rows that say they are in this pool and have no slot: worker → stamp when first seen."""
        self._stamp = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event at monotonic time `now`; returns what to do, in order."""
        self._commands = []
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
                    self._heard(slot, report.phase, now)
            case Exited(worker, status):
                self._exited(worker, status, now)
            case Done() | Failed():
                self._answered(event, now)
            case Tick():
                pass
        self._advance(now)
        commands, self._commands = self._commands, []
        return commands

    def slot_of(self, worker: str) -> Slot | None:
        return self._slot_of(worker)

    def owns(self, slot: str) -> bool:
        """Whether a worker that says it runs in `slot` is one of this pool's."""
        return slot.startswith(f"{self.name}-")

    # Size

    def _resize(self, size: int, reason: str, now: float) -> None:
        if not 0 <= size <= LARGEST:
            raise ValueError(f"size: {size} is not within 0 to {LARGEST}")
        if size == self.target:
            return
        self._act(now, "target", f"{self.target} → {size}: {reason}")
        self.target = size

    def _fit(self, now: float) -> None:
        """Make as many slots wanted as the target says."""
        wanted = [slot for slot in self.slots.values() if slot.wanted]
        surplus = len(wanted) - self.target
        if surplus > 0:
            for slot in sorted(wanted, key=_least_missed)[:surplus]:
                slot.wanted = False
        for _ in range(-surplus):
            again = [s for s in self.slots.values() if not s.wanted and s.phase in _CAN_STAY]
            if again:
                min(again, key=lambda slot: slot.index).wanted = True
                continue
            index = next(i for i in range(LARGEST + 1) if f"{self.name}-{i}" not in self.slots)
            slot = Slot(f"{self.name}-{index}", index, since=now)
            self.slots[slot.name] = slot

    # What there is

    def _members_listed(self, event: Listed, now: float) -> None:
        self._under_way.pop(event.ticket, None)
        self._asked.pop(ListMembers, None)
        living = {member.worker: member for member in event.members}
        for slot in list(self.slots.values()):
            if slot.worker is not None and slot.worker not in living and slot.known_since < event.ticket:
                self._exited(slot.worker, "it is not there any more", now)
        for member in sorted(event.members, key=lambda m: (m.slot, m.worker)):
            if self._slot_of(member.worker) is not None or self._obituaries.knows(member.worker):
                continue
            self._adopt(member.slot, member.worker, member.pid, now)
        for worker, seen in self._orphans.items():
            if seen < event.ticket and worker not in living:
                self._obituaries.add(worker, "no such process in the pool")
        self.adopted = True

    def _adopt(self, name: str, worker: str, pid: int | None, now: float) -> None:
        taken = self.slots.get(name)
        number = name.removeprefix(f"{self.name}-")
        if taken is None and number.isdigit():
            slot = Slot(name, int(number))
        elif taken is not None and taken.worker is None and taken.phase is SlotPhase.VACANT:
            slot = taken
        else:
            # A double: one slot cannot have two. It may hold sessions, so it is drained like any other.
            slot = Slot(f"{self.name}-extra-{worker}", LARGEST, wanted=False)
        slot.phase = SlotPhase.VACANT
        slot.occupy(worker, now, self._next(), pid)
        slot.enter(SlotPhase.LAUNCHING, now, "found alive, waiting to hear from it")
        self.slots[slot.name] = slot
        self._act(now, "adopt", f"process {pid} was there already", slot)

    def _workers_listed(self, event: WorkersListed, now: float) -> None:
        self._under_way.pop(event.ticket, None)
        self._asked.pop(ListWorkers, None)
        self.rows = {record.id: record for record in event.workers}
        for slot in list(self.slots.values()):
            if slot.worker is None:
                continue
            row = self.rows.get(slot.worker)
            if row is not None:
                slot.listed = True
                slot.sessions, slot.suspended = row.sessions, row.suspended
                self._heard(slot, row.phase, now)
                drained = slot.drained_since is not None and event.ticket > slot.drained_since
                if slot.phase is SlotPhase.DRAINING and drained and slot.held == 0:
                    self._release(slot, "drained", now)
            if self._is_late(slot, row, self._asked_at[ListWorkers]):
                self._fail(slot, f"not ready within {self.policy.ready_timeout_s:g} s", now)
            elif row is None and self._has_vanished(slot, event.ticket):
                self._fail(slot, "the state store does not know it any more", now)
        ours = [r.id for r in event.workers if r.pool_slot is not None and self.owns(r.pool_slot)]
        orphans = [worker for worker in ours if self._slot_of(worker) is None]
        self._orphans = {worker: self._orphans.get(worker, self._next()) for worker in orphans}

    @staticmethod
    def _has_vanished(slot: Slot, ticket: int) -> bool:
        """Whether the store had a row of its worker before, and now, asked with `ticket`, has none."""
        return slot.listed and slot.phase is not SlotPhase.RELEASING and slot.known_since < ticket

    def _is_late(self, slot: Slot, row: WorkerRecord | None, asked_at: float) -> bool:
        """Whether the store, asked after the time-out, said that the worker is still not ready.

        Not hearing from it is no reason: it may serve sessions while only we are cut off.
        """
        return (
            slot.phase in (SlotPhase.LAUNCHING, SlotPhase.LOADING)
            and asked_at - slot.launched_at >= self.policy.ready_timeout_s
            and (row is None or row.phase is WorkerPhase.STARTING)
        )

    def _heard(self, slot: Slot, phase: WorkerPhase, now: float) -> None:
        """A worker, or its row, says how far it is."""
        if slot.phase is SlotPhase.LAUNCHING and phase is WorkerPhase.STARTING:
            slot.enter(SlotPhase.LOADING, now, "registered, loading its model")
        elif slot.phase in (SlotPhase.LAUNCHING, SlotPhase.LOADING) and phase is WorkerPhase.READY:
            took_s = now - slot.launched_at
            slot.enter(SlotPhase.READY, now, f"ready {took_s:.1f} s after its launch")
            slot.ready_at = now
            self._act(now, "ready", slot.reason, slot)
        elif phase is WorkerPhase.DRAINING and slot.phase in _CAN_STAY:
            # Somebody told it to drain, perhaps this service before a restart: that cannot be taken back.
            slot.wanted = False
            if slot.phase is SlotPhase.LAUNCHING:
                slot.enter(SlotPhase.LOADING, now, "registered, draining")

    def _exited(self, worker: str, status: str, now: float) -> None:
        self._obituaries.add(worker, status)
        slot = self._slot_of(worker)
        if slot is None:
            return
        self._act(now, "gone", status, slot)
        if slot.phase is SlotPhase.RELEASING:
            return
        self._count_failure(slot, now)
        slot.vacate()
        if slot.wanted:
            slot.enter(SlotPhase.BACKING_OFF, now, status)
        else:
            self._release(slot, status, now)

    def _fail(self, slot: Slot, reason: str, now: float) -> None:
        """Its worker is no good: end it, and begin again later."""
        self._act(now, "fail", reason, slot)
        self._count_failure(slot, now)
        self._release(slot, reason, now)

    def _count_failure(self, slot: Slot, now: float) -> None:
        if slot.ready_at is not None and now - slot.ready_at >= self.policy.stable_s:
            slot.failures = 0
        slot.failures += 1
        slot.retry_at = now + self._backoff(slot.failures)

    def _backoff(self, failures: int) -> float:
        """Nothing after the first failure, then doubling."""
        if failures <= 1:
            return 0.0
        return min(self.policy.backoff_s * 2.0 ** min(failures - 2, 16), self.policy.backoff_limit_s)

    # What became of commands

    def _answered(self, event: Done | Failed, now: float) -> None:
        command = self._under_way.pop(event.ticket, None)
        match command:
            case ListMembers() | ListWorkers():
                self._asked.pop(type(command), None)
            case DeclareGone():
                missing = isinstance(event, Failed) and event.missing
                self._obituaries.answered(command.worker, isinstance(event, Done) or missing, now)
            case Reserve() | Launch() | Drain() | Release():
                slot = self.slots.get(command.slot)
                if slot is not None and slot.ticket == event.ticket:
                    slot.ticket = None
                    self._settle(slot, command, event, now)
            case _:
                pass

    def _settle(self, slot: Slot, command: Command, event: Done | Failed, now: float) -> None:
        match command, event:
            case Reserve(), Done():
                slot.reserved = True
                self._launch(slot, now)
            case Reserve(), Failed(reason=reason):
                self._act(now, "fail", f"reserve: {reason}", slot)
                self._count_failure(slot, now)
                slot.enter(SlotPhase.BACKING_OFF, now, f"reserve: {reason}")
            case Launch(), Done(pid=pid):
                slot.pid = pid
            case Launch(), Failed(reason=reason):
                # It may have started all the same: whatever there is, is released.
                self._fail(slot, f"launch: {reason}", now)
            case Drain(), Done():
                slot.drained_since = self._next()
            case Drain(), Failed(missing=True):
                self._fail(slot, "the state store does not know it", now)
            case Drain(), Failed():
                slot.retry_at = now + self.policy.retry_s
            case Release(), Done():
                self._released(slot, now)
            case Release(), Failed(reason=reason):
                slot.reason, slot.retry_at = f"release: {reason}", now + self.policy.retry_s
            case _:
                pass

    def _released(self, slot: Slot, now: float) -> None:
        if slot.worker is not None:
            self._obituaries.add(slot.worker, slot.reason)
        slot.vacate()
        slot.reserved = False
        if slot.wanted:
            slot.enter(SlotPhase.BACKING_OFF, now, slot.reason)
        else:
            slot.enter(SlotPhase.VACANT, now, slot.reason)

    # What to do next

    def _advance(self, now: float) -> None:
        if self.adopted:
            self._fit(now)
            for slot in list(self.slots.values()):
                self._step(slot, now)
        self._ask(ListMembers, now)
        self._ask(ListWorkers, now)
        for worker, reason in self._obituaries.due(now):
            self._send(DeclareGone(self._next(), worker, reason))

    def _step(self, slot: Slot, now: float) -> None:
        match slot.phase:
            case SlotPhase.VACANT if slot.wanted:
                slot.enter(SlotPhase.RESERVING, now, "the pool wants a worker here")
                self._send(Reserve(self._take(slot), slot.name))
            case SlotPhase.VACANT:
                del self.slots[slot.name]
            case SlotPhase.BACKING_OFF if not slot.wanted:
                self._release(slot, "not wanted any more", now)
            case SlotPhase.BACKING_OFF if slot.retry_at <= now and slot.reserved:
                self._launch(slot, now)
            case SlotPhase.BACKING_OFF if slot.retry_at <= now:
                slot.enter(SlotPhase.RESERVING, now, "trying again")
                self._send(Reserve(self._take(slot), slot.name))
            case SlotPhase.LOADING | SlotPhase.READY if not slot.wanted:
                # Not from LAUNCHING: a worker that is about to register could be given sessions unseen.
                slot.enter(SlotPhase.DRAINING, now, "not wanted any more")
                slot.drain_deadline = now + self.policy.drain_deadline_s
                slot.retry_at = now
                self._act(now, "drain", slot.reason, slot)
                self._drain(slot, now)
            case SlotPhase.DRAINING:
                self._drain(slot, now)
            case SlotPhase.RELEASING if slot.ticket is None and slot.retry_at <= now:
                self._send(Release(self._take(slot), slot.name, slot.worker, slot.reason))
            case _:
                pass

    def _launch(self, slot: Slot, now: float) -> None:
        slot.occupy(self._new_worker(), now, self._next())
        slot.enter(SlotPhase.LAUNCHING, now, "started, waiting to hear from it")
        assert slot.worker is not None
        self._act(now, "launch", f"attempt {slot.failures + 1}", slot)
        self._send(Launch(self._take(slot), slot.name, slot.worker))

    def _drain(self, slot: Slot, now: float) -> None:
        if slot.drained_since is None:
            if slot.ticket is None and slot.retry_at <= now:
                assert slot.worker is not None
                self._send(Drain(self._take(slot), slot.name, slot.worker))
        elif now >= slot.drain_deadline:
            slot.drain_deadline = now + self.policy.drain_deadline_s
            slot.reason = (
                f"still holds {slot.sessions} sessions and {slot.suspended} suspended ones; deadline extended"
            )
            self._act(now, "extend", slot.reason, slot)

    def _release(self, slot: Slot, reason: str, now: float) -> None:
        slot.enter(SlotPhase.RELEASING, now, reason)
        self._act(now, "release", reason, slot)
        # Whatever else was under way for it, its answer does not matter any more.
        self._send(Release(self._take(slot), slot.name, slot.worker, reason))

    def _ask(self, question: type[ListMembers] | type[ListWorkers], now: float) -> None:
        if question in self._asked or now - self._asked_at.get(question, -1e9) < self.policy.list_s:
            return
        self._asked[question], self._asked_at[question] = self._next(), now
        self._send(question(self._asked[question]))

    def _slot_of(self, worker: str) -> Slot | None:
        return next((slot for slot in self.slots.values() if slot.worker == worker), None)

    def _next(self) -> int:
        self._stamp += 1
        return self._stamp

    def _take(self, slot: Slot) -> int:
        slot.ticket = self._next()
        return slot.ticket

    def _send(self, command: Command) -> None:
        self._under_way[command.ticket] = command
        self._commands.append(command)

    def _act(self, now: float, action: str, reason: str, slot: Slot | None = None) -> None:
        name, worker = (slot.name, slot.worker) if slot is not None else (None, None)
        self.actions.append(Action(now, action, reason, name, worker))


_CAN_STAY = frozenset(
    {
        SlotPhase.VACANT,
        SlotPhase.RESERVING,
        SlotPhase.LAUNCHING,
        SlotPhase.LOADING,
        SlotPhase.READY,
        SlotPhase.BACKING_OFF,
    }
)
"""Phases in which a slot that was not wanted may be wanted again: a drain cannot be taken back."""

_COST = {
    SlotPhase.VACANT: 0,
    SlotPhase.BACKING_OFF: 1,
    SlotPhase.RELEASING: 1,
    SlotPhase.RESERVING: 2,
    SlotPhase.LAUNCHING: 3,
    SlotPhase.LOADING: 4,
}


def _least_missed(slot: Slot) -> tuple[int, int, int]:
    """Which slot to give up first: one without a worker, then the one with the fewest sessions."""
    return _COST.get(slot.phase, 5), slot.held, -slot.index
