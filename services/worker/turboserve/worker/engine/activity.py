"""What an active session does: one class for each state."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.worker.engine.context_forwards import ReplayPart
from turboserve.worker.engine.interface import SessionSpec
from turboserve.worker.engine.memory import Extent
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.engine.state_transfer import Transfer


@dataclass(frozen=True, slots=True, eq=False)
class Transferring:
    """The state is transferred to the slab or to the host: nothing else happens to the session."""

    transfer: Transfer


@dataclass(frozen=True, slots=True, eq=False)
class Starting:
    """The slab is the session's, but its prompt, its context or its decoder's cache is not complete."""

    replay: tuple[ReplayPart, ...] = ()
    """The clean passes that rebuild the session under its first prompt."""


@dataclass(frozen=True, slots=True)
class Running:
    """`SessionReady` was sent: the session generates each chunk when it is due."""


@dataclass(frozen=True)
class QuiesceRequest:
    """A request to quiesce a session at a chunk boundary at which no viewer waits for it."""

    quiet_s: float
    """Idle window: seconds for which the next chunk should not become due."""
    asked_s: float
    """When the request was made, monotonic seconds on the engine's clock."""
    patience_s: float
    """Time after which any boundary is accepted, seconds. Any is accepted at once from a session that falls
    behind its viewer."""
    number: int = 0
    """Number of the request, repeated in the `SessionQuiesced` that answers it."""

    def quiet_at(self, now: float) -> float:
        """Seconds for which the next chunk must not become due; zero: any boundary is accepted.

        The value shrinks until the patience ends. The time between two chunks of a session depends on the
        other sessions, and a boundary that comes soon may be the best one.
        """
        left_s = self.asked_s + self.patience_s - now
        return self.quiet_s * left_s / self.patience_s if left_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class QuiescedAtBoundary:
    """The session generates nothing until it is unquiesced. `SessionQuiesced` was sent, or it arrived so."""


@dataclass(frozen=True, slots=True, eq=False)
class HostState:
    """A session's state in host memory."""

    snapshot: Snapshot
    extent: Extent


@dataclass(frozen=True, slots=True, eq=False)
class Offloaded:
    """The session is active and has no slab: another session uses it, or none was free yet."""

    state: HostState | None
    """None: the session has not had a slab yet."""
    spec: SessionSpec | None = None
    """How the session begins, where there is no state."""
    arrived: Snapshot | None = None
    """The snapshot, outside the host pool, with which the session begins."""
    quiesced: bool = False
    """Whether it is quiesced at its boundary; it does not return then. `SessionQuiesced` was sent."""


STARTING, RUNNING, QUIESCED = Starting(), Running(), QuiescedAtBoundary()


Activity = Running | Starting | Transferring | QuiescedAtBoundary | Offloaded
"""What an active session does. Arriving: `Transferring` → `Starting` → `Running`. Leaving: `Running` →
`Transferring`, after which the session is suspended or offloaded, or runs on if the transfer failed.
Returning: `Offloaded` → `Transferring` → `Starting`, from the arrival of its first layer on."""
