"""One slot of the pool: the place of one worker at a time, and where that worker is in its life."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.pool import SlotPhase

NEXT: dict[SlotPhase, frozenset[SlotPhase]] = {
    SlotPhase.VACANT: frozenset({SlotPhase.RESERVING, SlotPhase.LAUNCHING}),
    SlotPhase.RESERVING: frozenset({SlotPhase.LAUNCHING, SlotPhase.BACKING_OFF, SlotPhase.RELEASING}),
    SlotPhase.LAUNCHING: frozenset(
        {SlotPhase.LOADING, SlotPhase.READY, SlotPhase.RELEASING, SlotPhase.BACKING_OFF}
    ),
    SlotPhase.LOADING: frozenset(
        {SlotPhase.READY, SlotPhase.DRAINING, SlotPhase.RELEASING, SlotPhase.BACKING_OFF}
    ),
    SlotPhase.READY: frozenset({SlotPhase.DRAINING, SlotPhase.RELEASING, SlotPhase.BACKING_OFF}),
    SlotPhase.DRAINING: frozenset({SlotPhase.RELEASING, SlotPhase.BACKING_OFF}),
    SlotPhase.RELEASING: frozenset({SlotPhase.VACANT, SlotPhase.BACKING_OFF}),
    SlotPhase.BACKING_OFF: frozenset({SlotPhase.RESERVING, SlotPhase.LAUNCHING, SlotPhase.RELEASING}),
}
"""What may follow what. Only DRAINING ends a worker that could hold sessions, unless it is dead anyway."""

STARTING = frozenset({SlotPhase.RESERVING, SlotPhase.LAUNCHING, SlotPhase.LOADING, SlotPhase.BACKING_OFF})


@dataclass
class Slot:
    """State of one slot. Times are monotonic seconds."""

    name: str
    index: int
    phase: SlotPhase = SlotPhase.VACANT
    since: float = 0.0
    reason: str = "new"
    wanted: bool = True
    reserved: bool = False
    """The provider holds resources for it."""
    worker: str | None = None
    pid: int | None = None
    launched_at: float = 0.0
    ready_at: float | None = None
    listed: bool = False
    """The store has had a row of this worker."""
    known_since: int = 0
    """Stamp of the launch or adoption, to compare with what was asked before."""
    sessions: int = 0
    suspended: int = 0
    failures: int = 0
    retry_at: float = 0.0
    ticket: int | None = None
    """The one command under way for it."""
    drained_since: int | None = None
    """Stamp after which the store places nothing more here; None before that is certain."""
    drain_deadline: float = 0.0

    def enter(self, phase: SlotPhase, now: float, reason: str) -> None:
        assert phase in NEXT[self.phase], f"{self.name}: {self.phase} → {phase}"
        self.phase, self.since, self.reason = phase, now, reason

    def occupy(self, worker: str, now: float, stamp: int, pid: int | None = None) -> None:
        """A new worker comes into this slot."""
        self.worker, self.pid, self.reserved = worker, pid, True
        self.launched_at, self.known_since, self.ready_at = now, stamp, None
        self.listed, self.drained_since = False, None
        self.sessions = self.suspended = 0

    def vacate(self) -> None:
        """Its worker is no more."""
        self.worker = self.pid = self.ready_at = self.drained_since = self.ticket = None
        self.sessions = self.suspended = 0

    @property
    def held(self) -> int:
        """Sessions that would be harmed by ending the worker."""
        return self.sessions + self.suspended
