"""One session as its worker sees it: what the row wants, and where its state is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.worker.service.events import Ownership


class StateLocation(Enum):
    """Where the session's state is."""

    NOWHERE = "nowhere"
    SLAB = "slab"
    LEAVING = "leaving"
    """In a slab, on its way to host memory."""
    HOST = "host"


class DesiredState(Enum):
    """What the row asks of this worker."""

    RUN = "run"
    HOST = "host"
    WAIT = "wait"
    """The fence is not in the log yet: start nothing, stop nothing."""


class PendingQuery(Enum):
    """What was asked and not answered yet."""

    LOG_END = "log end"
    LATENTS = "latents"


@dataclass(eq=False)
class OutgoingMigration:
    """The state is being given to the target of a move."""

    move: int
    quiesce: int | None = None
    """Number of the wish that it stand still, once that was told."""
    quiesced_at: int | None = None
    """The chunk before which the session stands still."""
    whole: bool = False
    """All its chunks are in the log."""
    manifest_sent: bool = False
    """The target has all it needs to run it."""
    asked_at: float = 0.0
    """When the row was last asked for since."""


@dataclass(eq=False)
class SessionEntry:
    """State of one session in the table."""

    record: SessionRecord
    learned_at: float
    """When the row was last confirmed, monotonic seconds."""
    run: int
    place: StateLocation = StateLocation.NOWHERE
    awaiting: PendingQuery | None = None
    query: int = 0
    """Number of the newest question; answers to older ones are ignored."""
    checked: Ownership | None = None
    """The ownership under which the log's end was read: publishing is allowed under no other."""
    fenced: Ownership | None = None
    """The ownership that the broker refused: nothing is published until the row names another."""
    next_publish: int = 0
    """Index after the last chunk known to be in the log."""
    last_epoch: int = 0
    """Of that chunk; 0: there is none, or the log has dropped it."""
    began: int | None = None
    """The first chunk in the log that may be of the ownership under which its end was read..."""
    before: int = 0
    """...and the epoch of the one before that."""
    made_next: int = 0
    """Index of the chunk that the engine makes next."""
    pending: deque[int] = field(default_factory=deque)
    """Chunks packaged and not known to be in the log, contiguous."""
    retry_at: float = 0.0
    attempts: int = 0
    tried_at: float = 0.0
    """When the pending publication was first tried since the log's end was read."""
    control_sent: int = 0
    """Number of the newest control given to the engine."""
    control_taken: int = 0
    playhead_s: float = 0.0
    paused: bool = False
    quiesced: bool = False
    """It was told to stand still for a move, or came here so."""
    outgoing_migration: OutgoingMigration | None = None
    suspended_order: int = 0
    """Rises with every arrival on the host: the lowest has been there longest."""
    have_latents: bool = False
    refusal: str | None = None
    """Why this worker does not do what the row wants."""
    refused_until: float = 0.0
    finished: str | None = None
    """Why it ends after the chunks that are pending."""
    failure: str | None = None
    """Why the session cannot go on; it is over once the row says so."""

    @property
    def session(self) -> str:
        return self.record.id

    @property
    def ownership(self) -> Ownership:
        """The current one by the row; only of meaning where the fence is in the log."""
        return self.record.epoch, self.record.own_revision or 0

    @property
    def wanted(self) -> DesiredState:
        if self.record.own_revision is None or not (
            self.record.phase.holds_slot or self.record.phase is Phase.SUSPENDED
        ):
            return DesiredState.WAIT
        return DesiredState.RUN if self.record.phase.holds_slot else DesiredState.HOST

    @property
    def is_fenced(self) -> bool:
        return self.fenced == self.ownership

    @property
    def takes_slot(self) -> bool:
        """Whether it holds a slab, or one is kept for it."""
        return (
            self.place in (StateLocation.SLAB, StateLocation.LEAVING)
            or self.awaiting is PendingQuery.LATENTS
            or self.have_latents
        )

    @property
    def paused_in_slab(self) -> bool:
        """In a slab although the row wants it suspended: host memory is full."""
        return self.place is StateLocation.SLAB and self.paused and self.wanted is DesiredState.HOST
