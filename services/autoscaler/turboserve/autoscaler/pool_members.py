"""One member of the pool: the place of one worker at a time, and where that worker is in its life."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.pool import PoolMemberPhase

NEXT: dict[PoolMemberPhase, frozenset[PoolMemberPhase]] = {
    PoolMemberPhase.VACANT: frozenset({PoolMemberPhase.RESERVING, PoolMemberPhase.LAUNCHING}),
    PoolMemberPhase.RESERVING: frozenset(
        {PoolMemberPhase.LAUNCHING, PoolMemberPhase.BACKING_OFF, PoolMemberPhase.RELEASING}
    ),
    PoolMemberPhase.LAUNCHING: frozenset(
        {
            PoolMemberPhase.LOADING,
            PoolMemberPhase.READY,
            PoolMemberPhase.RELEASING,
            PoolMemberPhase.BACKING_OFF,
        }
    ),
    PoolMemberPhase.LOADING: frozenset(
        {
            PoolMemberPhase.READY,
            PoolMemberPhase.DRAINING,
            PoolMemberPhase.RELEASING,
            PoolMemberPhase.BACKING_OFF,
        }
    ),
    PoolMemberPhase.READY: frozenset(
        {PoolMemberPhase.DRAINING, PoolMemberPhase.RELEASING, PoolMemberPhase.BACKING_OFF}
    ),
    PoolMemberPhase.DRAINING: frozenset({PoolMemberPhase.RELEASING, PoolMemberPhase.BACKING_OFF}),
    PoolMemberPhase.RELEASING: frozenset({PoolMemberPhase.VACANT, PoolMemberPhase.BACKING_OFF}),
    PoolMemberPhase.BACKING_OFF: frozenset(
        {PoolMemberPhase.RESERVING, PoolMemberPhase.LAUNCHING, PoolMemberPhase.RELEASING}
    ),
}
"""What may follow what. Only DRAINING ends a worker that could hold sessions, unless it is dead anyway."""

STARTING = frozenset(
    {
        PoolMemberPhase.RESERVING,
        PoolMemberPhase.LAUNCHING,
        PoolMemberPhase.LOADING,
        PoolMemberPhase.BACKING_OFF,
    }
)
KEEPABLE = frozenset({*STARTING, PoolMemberPhase.VACANT, PoolMemberPhase.READY})
"""Phases in which a slot that was not wanted may be wanted again."""


@dataclass
class PoolMember:
    """State of one slot. Times are monotonic seconds."""

    name: str
    index: int
    phase: PoolMemberPhase = PoolMemberPhase.VACANT
    since: float = 0.0
    reason: str = "new"
    wanted: bool = True
    drain_requested: bool = False
    """Its worker was told to drain, by whomever: that cannot be taken back."""
    reserved: bool = False
    """The provider holds resources for it."""
    worker: str | None = None
    pid: int | None = None
    launched_at: float = 0.0
    adopted: bool = False
    """Its worker was found, not launched: nobody here knows since when it is there."""
    ready_at: float | None = None
    listed: bool = False
    """The store has had a row of this worker."""
    up_since: int | None = None
    """Stamp after which its worker was there for certain; None while the launch is under way."""
    reported_at: float | None = None
    """When its worker last spoke for itself; None: it has not."""
    sessions: int = 0
    suspended: int = 0
    failures: int = 0
    retry_at: float = 0.0
    ticket: int | None = None
    """The one command under way for it."""
    incoming: int = 0
    """Sessions that are being moved to its worker."""
    drained_since: int | None = None
    """Stamp after which the store places nothing more here; None before that is certain."""
    drain_deadline: float = 0.0

    def enter(self, phase: PoolMemberPhase, now: float, reason: str) -> None:
        assert phase in NEXT[self.phase], f"{self.name}: {self.phase} → {phase}"
        self.phase, self.since, self.reason = phase, now, reason

    def occupy(self, worker: str, now: float, *, adopted: bool = False) -> None:
        """A new worker comes into this slot."""
        self.adopted = adopted
        self.worker, self.pid, self.up_since, self.reserved = worker, None, None, True
        self.launched_at, self.ready_at, self.reported_at = now, None, None
        self.listed, self.drain_requested, self.drained_since = False, False, None
        self.sessions = self.suspended = self.incoming = 0

    def vacate(self) -> None:
        """Its worker is no more."""
        self.worker = self.pid = self.up_since = self.ready_at = self.drained_since = self.ticket = None
        self.reported_at = None
        self.sessions = self.suspended = self.incoming = 0

    def is_up_since(self, ticket: int) -> bool:
        """Whether its worker was there when the question `ticket` was asked."""
        return self.up_since is not None and self.up_since < ticket

    def has_vanished(self, ticket: int) -> bool:
        """Whether the store, which had its row before and was asked with `ticket`, should still have it."""
        return self.listed and self.phase is not PoolMemberPhase.RELEASING and self.is_up_since(ticket)

    def has_reported(self, since: float) -> bool:
        """Whether its worker has spoken for itself after `since`."""
        return self.reported_at is not None and self.reported_at > since

    @property
    def held(self) -> int:
        """Sessions that would be harmed by ending the worker."""
        return self.sessions + self.suspended + self.incoming
