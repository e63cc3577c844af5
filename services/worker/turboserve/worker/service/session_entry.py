"""One session as its worker sees it: what the row wants, and where its state is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from turboserve.contracts.controls import ControlValues
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import HeldSession
from turboserve.worker.service import events
from turboserve.worker.service.commands import Limits
from turboserve.worker.service.events import LogPlace, Ownership


@dataclass(frozen=True)
class Absent:
    """No state is here, and no slot is kept for it."""


@dataclass(frozen=True)
class FetchingLatents:
    """A slot is kept. The latents from which the state is rebuilt are being read."""

    query: int
    """Number of the query. Answers to other queries are ignored."""


@dataclass(frozen=True)
class LatentsReady:
    """A slot is kept. The latents from which the state is rebuilt are here."""


@dataclass(frozen=True)
class Present:
    """The state is here, and the engine knows the session."""

    paused: bool = False
    """Whether the engine has the command to generate nothing."""
    quiesced: bool = False
    """Whether a quiesce was requested for a migration, or the session arrived quiesced."""


@dataclass(frozen=True)
class InSlab(Present):
    """The state is in a slab."""

    next_asked: bool = False
    """Whether the engine has the command to generate the next chunk at once, after a loss of the log."""


@dataclass(frozen=True)
class LeavingSlab(Present):
    """The state is in a slab, about to move to host memory."""


@dataclass(frozen=True)
class OnHost(Present):
    """The state is in host memory."""

    order: int = 0
    """Increases with every arrival on the host. The lowest number has been there longest."""


@dataclass(frozen=True)
class Failed:
    """No state is here, and the session cannot continue. The session is over once the row says so."""

    reason: str


EntryState = Absent | FetchingLatents | LatentsReady | InSlab | LeavingSlab | OnHost | Failed
"""Where the session's state is, and what this worker does to get it."""


class DesiredState(Enum):
    """What the row asks of this worker."""

    RUN = "run"
    HOST = "host"
    WAIT = "wait"
    """The fence is not in the log yet: start nothing, stop nothing."""


# Python 3.11 builds a union again in each call.
_RUN, _TAKE_SLOT = DesiredState.RUN, (InSlab, LeavingSlab, FetchingLatents, LatentsReady)


@dataclass(eq=False)
class OutgoingMigration:
    """The source's side of a migration."""

    migration: int
    quiesce: int | None = None
    """Number of the quiesce request, once it was sent."""
    quiesced_at: int | None = None
    """The chunk before which the session is quiesced."""
    whole: bool = False
    """Whether all chunks of the session are in the log."""
    manifest_sent: bool = False
    """Whether the target may have the complete state."""
    asked_at: float = 0.0
    """When the row was last requested, monotonic seconds."""


@dataclass(eq=False)
class SessionEntry:
    """State of one session in the table."""

    record: SessionRecord
    learned_at: float
    """When the row was last confirmed, monotonic seconds."""
    run: int
    """Number of the engine's run. Events of other runs are ignored."""
    state: EntryState = field(default_factory=Absent)
    log_end_query: int | None = None
    """Number of the query for the log's end; None: no answer is awaited. Answers to others are ignored."""
    checked: Ownership | None = None
    """The ownership under which the log's end was read. Publishing is allowed under no other."""
    fenced: tuple[Ownership, int] | None = None
    """The ownership that the broker refused, and the version of the row that named it. Nothing is published
    until a later row: the log may have lost the fence, and a later row may have it again."""
    log_doubted: bool = False
    """Whether the log's end is to be read again once no publication is in flight: the broker was away, and
    may have come back without the end of its log."""
    newest: LogPlace | None = None
    """Place of the newest chunk that this worker knows to be in the log."""
    doubted: LogPlace | None = None
    """`newest` when the broker was last away. A log without that chunk has lost its end, also where a chunk
    that was in flight meanwhile ends it."""
    expected: LogPlace | None = None
    """Place of the chunk that the newest query for the log's end looks for."""
    log_lost: bool = False
    """Whether the log ends before `next_publish`. Its viewers wait for a chunk that was lost. They notice the
    loss with the next chunk, which therefore must not wait for their playhead."""
    tried_version: int = 0
    """Version of the row when the newest publication began."""
    next_publish: int = 0
    """Index after the last chunk known to be in the log."""
    last_epoch: int = 0
    """Epoch of the last chunk known to be in the log. 0: there is none, or the log has dropped it."""
    began: int | None = None
    """First chunk in the log that may belong to the ownership under which the log's end was read."""
    before: int = 0
    """Epoch of the chunk before `began`; 0 if there is none."""
    contiguous_from: int = 0
    """Index from which on the log has lost no chunk of the session: see `ChunkHeader`."""
    made_next: int = 0
    """Index of the chunk that the engine generates next."""
    pending: deque[int] = field(default_factory=deque)
    """Chunks that are packaged and not known to be in the log, contiguous."""
    retry_at: float = 0.0
    attempts: int = 0
    tried_at: float = 0.0
    """When the pending publication was first tried since the log's end was read."""
    control_sent: int = 0
    """Number of the newest control given to the engine."""
    lacks_values: bool = False
    """Whether the engine got that control without the values of typed controls."""
    control_taken: int = 0
    last_control: int = 0
    """Number of the control of the last chunk known to be in the log."""
    drop_sent: int = 0
    """Number of the newest control whose drop of the buffer was given to the engine."""
    limits_sent: Limits | None = None
    """Limits that the engine has. None: not known."""
    answered: float | None = None
    """`requested_at` of the row when a chunk was published last: that request is answered."""
    playhead_s: float = 0.0
    outgoing_migration: OutgoingMigration | None = None
    refusal: str | None = None
    """Why this worker does not do what the row wants."""
    refused_until: float = 0.0
    finished: str | None = None
    """Why the session ends after its pending chunks."""

    @property
    def session(self) -> str:
        return self.record.id

    @property
    def ownership(self) -> Ownership:
        """The current ownership by the row. Valid only where the fence is in the log."""
        return self.record.epoch, self.record.own_revision or 0

    @property
    def limits(self) -> Limits:
        """The row's limits."""
        return Limits(self.record.quality, self.record.max_lead_s)

    @property
    def has_limits(self) -> bool:
        """Whether the engine has the row's limits."""
        sent, record = self.limits_sent, self.record
        return sent is not None and (sent.quality, sent.max_lead_s) == (record.quality, record.max_lead_s)

    @property
    def values(self) -> ControlValues | None:
        """The row's values of typed controls. None: a state store that knows none has sent the row."""
        return self.record.controls if "controls" in self.record.model_fields_set else None

    @property
    def has_conditions(self) -> bool:
        """Whether the engine has the row's prompt and, if they are known, its values of controls."""
        lacks = self.lacks_values and self.values is not None
        return self.record.control_seq <= self.control_sent and not lacks

    def waiting_s(self, now: float) -> float | None:
        """Age of the request that the next chunk is the first to answer, seconds. None: it answers none."""
        record = self.record
        if record.waiting_s is None or self.answered == record.requested_at:
            return None
        return record.waiting_s + max(0.0, now - self.learned_at)

    @property
    def wanted(self) -> DesiredState:
        record = self.record
        if record.own_revision is None:
            return DesiredState.WAIT
        if record.phase.holds_slot:
            return _RUN
        return DesiredState.HOST if record.phase is Phase.SUSPENDED else DesiredState.WAIT

    @property
    def is_fenced(self) -> bool:
        return self.fenced is not None and self.fenced == (self.ownership, self.record.version)

    @property
    def takes_slot(self) -> bool:
        """Whether the session holds a slab, or one is kept for it."""
        return isinstance(self.state, _TAKE_SLOT)

    def held(self, media_start_s: Callable[[int], float]) -> HeldSession:
        """Return the report of the state. `media_start_s`: chunk index → its start, seconds."""
        return HeldSession(
            session=self.session,
            epoch=self.record.epoch,
            next_chunk=self.next_publish,
            resident=not isinstance(self.state, OnHost),
            lead_s=media_start_s(self.made_next) - self.playhead_s,
            control_seq=self.control_taken,
        )

    def published(self, message: events.Published) -> None:
        """Record that the oldest pending chunk is in the log."""
        self.pending.popleft()
        self.newest = message.index, message.sequence
        self.next_publish, self.last_epoch = message.index + 1, message.ownership[0]
        self.last_control = max(self.last_control, message.control_seq)
        self.answered = self.record.requested_at
        self.attempts, self.retry_at = 0, 0.0
        if not message.duplicate:
            self.log_lost = False
        elif self.log_lost and isinstance(self.state, InSlab):
            # The chunk in the log may have been sent before the loss was known: the next one shows it.
            self.state = replace(self.state, next_asked=False)

    def log_read(self, message: events.LogEndRead, end: int, *, counted: bool) -> None:
        """Record the log's end. `end`: index after the last chunk of the log, the row or this entry.

        `counted`: chunks that this entry did not know to be in the log were this worker's, by the row.
        """
        # Until a chunk follows a loss, only this entry knows of it.
        further = message.next_chunk > self.next_publish
        # A chunk that the log has lost may have shown its prompt.
        self.last_control = max(self.last_control, message.control_seq, self.record.applied_control_seq)
        if message.next_chunk == end:
            self.last_epoch = message.epoch
        elif end != self.next_publish and not counted:
            self.last_epoch = 0
        self.log_lost = message.next_chunk < end or message.known_lost or (self.log_lost and not further)
        contiguous_from = max(message.contiguous_from, 0 if further else self.contiguous_from)
        if message.next_chunk < end:
            contiguous_from = end
        elif message.known_lost and self.expected is not None:
            # A chunk that was in flight while the broker was away follows the lost ones.
            contiguous_from = max(contiguous_from, self.expected[0] + 1)
        self.next_publish, self.checked, self.contiguous_from = end, self.ownership, contiguous_from
        self.newest = (message.next_chunk - 1, message.sequence) if message.next_chunk else None
        if not self.log_doubted:
            self.doubted = None
        if isinstance(self.state, InSlab):
            self.state = replace(self.state, next_asked=False)
        if self.began is None or self.last_epoch != self.record.epoch:
            self.began, self.before = end, self.last_epoch
        self.attempts, self.retry_at = 0, 0.0

    def awaits(self, query: int) -> bool:
        """Whether the answer to this query is still wanted."""
        return query == self.log_end_query or self.state == FetchingLatents(query)

    @property
    def paused_in_slab(self) -> bool:
        """Whether the state is in a slab although the row wants it suspended: host memory is full."""
        return isinstance(self.state, InSlab) and self.state.paused and self.wanted is DesiredState.HOST
