"""The life of one slot's worker: what happens to it, and what it needs next."""

from __future__ import annotations

from collections.abc import Callable

from turboserve.autoscaler.desk import Desk
from turboserve.autoscaler.messages import Command, Done, Drain, Failed, Launch, Release, Reserve
from turboserve.autoscaler.obituaries import Obituaries
from turboserve.autoscaler.policy import Policy
from turboserve.autoscaler.slots import KEEPABLE, Slot
from turboserve.contracts.pool import SlotPhase
from turboserve.contracts.workers import WorkerPhase, WorkerRecord


class Lifecycle:
    """Moves slots through reserve, launch, load, ready, drain and release (TurboServe, 6.2)."""

    def __init__(
        self, desk: Desk, obituaries: Obituaries, policy: Policy, new_worker: Callable[[], str]
    ) -> None:
        self._desk, self._obituaries, self._policy = desk, obituaries, policy
        self._new_worker = new_worker

    # What is heard of it

    def heard(self, slot: Slot, phase: WorkerPhase, now: float) -> None:
        """Its worker, or the row of it, says how far it is."""
        if slot.phase is SlotPhase.LAUNCHING and phase is WorkerPhase.STARTING:
            slot.enter(SlotPhase.LOADING, now, "registered, loading its model")
        elif slot.phase in (SlotPhase.LAUNCHING, SlotPhase.LOADING) and phase is WorkerPhase.READY:
            took_s = now - slot.launched_at
            slot.enter(SlotPhase.READY, now, f"ready {took_s:.1f} s after its launch")
            slot.ready_at = now
            self._desk.act(now, "ready", slot.reason, slot)
        elif phase is WorkerPhase.DRAINING and slot.phase in KEEPABLE:
            # Somebody told it to drain, perhaps this service before a restart: that cannot be taken back.
            slot.wanted, slot.sealed = False, True
            if slot.phase is SlotPhase.LAUNCHING:
                slot.enter(SlotPhase.LOADING, now, "registered, draining")

    def is_late(self, slot: Slot, row: WorkerRecord | None, asked_at: float) -> bool:
        """Whether the store, asked after the time-out, said that the worker is still not ready.

        Not hearing from it is no reason: it may serve sessions while only we are cut off.
        """
        return (
            slot.phase in (SlotPhase.LAUNCHING, SlotPhase.LOADING)
            and asked_at - slot.launched_at >= self._policy.ready_timeout_s
            and (row is None or row.phase is WorkerPhase.STARTING)
        )

    def exited(self, slot: Slot, status: str, now: float) -> None:
        """Its worker has ended by itself."""
        self._desk.act(now, "gone", status, slot)
        self._count_failure(slot, now)
        slot.vacate()
        if slot.wanted:
            slot.enter(SlotPhase.BACKING_OFF, now, status)
        else:
            self.release(slot, status, now)

    def fail(self, slot: Slot, reason: str, now: float) -> None:
        """Its worker is no good: end it, and begin again later."""
        self._desk.act(now, "fail", reason, slot)
        self._count_failure(slot, now)
        self.release(slot, reason, now)

    def _count_failure(self, slot: Slot, now: float) -> None:
        if slot.ready_at is not None and now - slot.ready_at >= self._policy.stable_s:
            slot.failures = 0
        slot.failures += 1
        slot.retry_at = now + self._policy.backoff(slot.failures)

    # What became of commands

    def settle(self, slot: Slot, command: Command, event: Done | Failed, now: float) -> None:
        """The slot's command was carried out, or not."""
        match command, event:
            case Reserve(), Done():
                slot.reserved = True
                self._launch(slot, now)
            case Reserve(), Failed(reason=reason):
                self._desk.act(now, "fail", f"reserve: {reason}", slot)
                self._count_failure(slot, now)
                slot.enter(SlotPhase.BACKING_OFF, now, f"reserve: {reason}")
            case Launch(), Done(pid=pid):
                slot.pid, slot.up_since = pid, self._desk.stamp()
            case Launch(), Failed(reason=reason, missing=True):
                self.exited(slot, f"launch: {reason}", now)
            case Launch(), Failed(reason=reason):
                # It may have started all the same: the provider's next listing tells.
                slot.reason, slot.up_since = f"launch: {reason}", self._desk.stamp()
            case Drain(), Done():
                slot.drained_since = self._desk.stamp()
            case Drain(), Failed(missing=True):
                self.fail(slot, "the state store does not know it", now)
            case Drain(), Failed(reason=reason):
                slot.reason, slot.retry_at = f"drain: {reason}", now + self._policy.retry_s
            case Release(), Done():
                self._released(slot, now)
            case Release(), Failed(reason=reason):
                slot.reason, slot.retry_at = f"release: {reason}", now + self._policy.retry_s
            case _:
                pass

    def _released(self, slot: Slot, now: float) -> None:
        if slot.worker is not None:
            self._obituaries.add(slot.worker, slot.reason, self._desk.stamp())
        slot.vacate()
        slot.reserved = False
        if slot.wanted:
            slot.enter(SlotPhase.BACKING_OFF, now, slot.reason)
        else:
            slot.enter(SlotPhase.VACANT, now, slot.reason)

    # What it needs next

    def step(self, slot: Slot, now: float) -> None:
        """Do what is next for the slot, if anything."""
        match slot.phase:
            case SlotPhase.VACANT if slot.wanted:
                slot.enter(SlotPhase.RESERVING, now, "the pool wants a worker here")
                self._desk.send(Reserve(self._desk.take(slot), slot.name))
            case SlotPhase.BACKING_OFF if not slot.wanted:
                self.release(slot, "not wanted any more", now)
            case SlotPhase.BACKING_OFF if slot.retry_at <= now and slot.reserved:
                self._launch(slot, now)
            case SlotPhase.BACKING_OFF if slot.retry_at <= now:
                slot.enter(SlotPhase.RESERVING, now, "trying again")
                self._desk.send(Reserve(self._desk.take(slot), slot.name))
            case SlotPhase.LOADING | SlotPhase.READY if not slot.wanted:
                # Not from LAUNCHING: a worker that is about to register could be given sessions unseen.
                slot.enter(SlotPhase.DRAINING, now, "not wanted any more")
                slot.drain_deadline, slot.retry_at = now + self._policy.drain_deadline_s, now
                self._desk.act(now, "drain", slot.reason, slot)
                self._drain(slot, now)
            case SlotPhase.DRAINING:
                self._drain(slot, now)
            case SlotPhase.RELEASING if slot.ticket is None and slot.retry_at <= now:
                self._desk.send(Release(self._desk.take(slot), slot.name, slot.worker, slot.reason))
            case _:
                pass

    def _launch(self, slot: Slot, now: float) -> None:
        slot.occupy(self._new_worker(), now)
        slot.enter(SlotPhase.LAUNCHING, now, "started, waiting to hear from it")
        assert slot.worker is not None
        self._desk.act(now, "launch", f"attempt {slot.failures + 1}", slot)
        self._desk.send(Launch(self._desk.take(slot), slot.name, slot.worker))

    def _drain(self, slot: Slot, now: float) -> None:
        if slot.drained_since is None and slot.ticket is None and slot.retry_at <= now:
            assert slot.worker is not None
            self._desk.send(Drain(self._desk.take(slot), slot.name, slot.worker))
        if now >= slot.drain_deadline:
            slot.drain_deadline = now + self._policy.drain_deadline_s
            held = f"still holds {slot.sessions} sessions and {slot.suspended} suspended ones"
            waits = held if slot.drained_since is not None else f"not accepted yet ({slot.reason})"
            slot.reason = f"{waits}; deadline extended"
            self._desk.act(now, "extend", slot.reason, slot)

    def release(self, slot: Slot, reason: str, now: float) -> None:
        """End its worker, if there is one, and give the slot back."""
        slot.enter(SlotPhase.RELEASING, now, reason)
        self._desk.act(now, "release", reason, slot)
        # Whatever else was under way for it, its answer does not matter any more.
        self._desk.send(Release(self._desk.take(slot), slot.name, slot.worker, reason))
