"""Records of one worker and one session in the scheduler's view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import MigrationReport, WorkerPhase

NOISE = 0.1
"""Relative change of a measured latency that counts as a change. Workers refine their profiles with every
chunk, and noise must not cause migrations."""


class ChangeTracked:
    """Calls `changed` whenever a field in `TRACKED_FIELDS` is set.

    So the cluster projection reads only what has changed. A change inside a field's value is not noticed.
    """

    TRACKED_FIELDS: ClassVar[frozenset[str]] = frozenset()
    changed: Callable[[], None] | None

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in self.TRACKED_FIELDS and (changed := self.__dict__.get("changed")) is not None:
            changed()


@dataclass
class WorkerView(ChangeTracked):
    """One worker that is not gone."""

    TRACKED_FIELDS = frozenset(
        {"capacity", "phase", "heard_at", "draining", "gone", "declaring", "full_until"}
        | {"host", "provides_state", "chunk_latency_s", "weights_digest"}
    )

    id: str
    model: str
    capacity: int
    phase: WorkerPhase
    heard_at: float
    """Listening time (see `liveness`) of the worker's last report, or of its addition to the view."""
    looked_at: float
    """Listening time at which the newest read of the worker's row was requested."""
    renewed_at: float
    """`renewed_at` of the worker's row, by the store's clock; compared only with its other values."""
    renewal_seen_at: float = 0.0
    """Listening time at which a read first showed the newest renewal."""
    known_since: int = 0
    """Stamp of the worker's addition to the view."""
    draining: bool = False
    started_at: float = 0.0
    """Start of the worker's process, wall-clock seconds; compared only with its other values."""
    gone: bool = False
    host: str = ""
    weights_digest: str | None = None
    """Digest of the worker's weights. None: not known."""
    provides_state: bool = False
    """Whether other workers can request the state of sessions from the worker."""
    chunk_latency_s: dict[int, float] = field(default_factory=dict)
    """Measured profile: seconds of a chunk by number of sessions in the batch."""
    used: set[str] = field(default_factory=set)
    """Sessions whose rows hold a slot on the worker."""
    reserved: set[str] = field(default_factory=set)
    """Sessions with a slot reserved on the worker by a decision that is not confirmed yet."""
    incoming: set[str] = field(default_factory=set)
    """Sessions that hold a slot and whose rows name the worker as migration target."""
    arrivals: dict[str, MigrationReport] = field(default_factory=dict)
    """Session → the worker's last report about the session's migration to it."""
    holding: set[str] = field(default_factory=set)
    """Suspended sessions whose rows name the worker as owner."""
    full_until: float = 0.0
    """The worker gets no session before this time, because the store reported it full."""
    declaring: bool = False
    """Whether a command that declares the worker gone is under way."""
    declare_after: float = 0.0
    """The worker is not declared gone before this time, after a declaration that failed."""
    changed: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def load(self) -> int:
        """Number of sessions that hold a slot, migrate to the worker or have a slot reserved."""
        return len(self.used | self.reserved | self.incoming)

    def measured(self, chunk_latency_s: Mapping[int, float]) -> None:
        """Apply a profile (seconds of a chunk by batch size) if it differs by more than `NOISE`."""
        known = self.chunk_latency_s
        if chunk_latency_s and (
            chunk_latency_s.keys() != known.keys()
            or any(abs(seconds - known[b]) > NOISE * known[b] for b, seconds in chunk_latency_s.items())
        ):
            self.chunk_latency_s = dict(chunk_latency_s)

    @property
    def ready(self) -> bool:
        """Whether the worker may get sessions."""
        return self.phase is WorkerPhase.READY and not self.draining and not self.declaring


@dataclass
class SessionView(ChangeTracked):
    """One session that has not ended."""

    # `refusals` and `migration_failures` change in place, always together with `refused_epoch` or
    # `rests_until`.
    TRACKED_FIELDS = frozenset(
        {"record", "must_read", "reserved_on", "begun_to", "ticket", "not_before"}
        | {"rests_until", "refused_epoch"}
    )

    record: SessionRecord
    touched: int
    """Stamp at which the row was last confirmed or replaced."""
    watched_at: float
    """Listening time from which idleness counts: the last viewer, or the moment at which the session was
    added, activated or wanted again."""
    ticket: int | None = None
    """Ticket of the one command under way for the session."""
    reserved_on: str | None = None
    """Worker on which a slot is reserved for the session."""
    begun_to: str | None = None
    """Target of a migration that is decided and not confirmed yet."""
    migration_seen: int | None = None
    """Number of the migration that `migration_since`, `migration_timeout_s` and `migration_abandon_reason`
    describe."""
    migration_since: float = 0.0
    """Listening time at which the migration was first seen, or at which its target first reported a limit."""
    migration_timeout_s: float | None = None
    """The migration is abandoned this long after `migration_since`. None: the target has not reported a
    limit, and `Policy.migration_timeout_s` applies."""
    migration_abandon_reason: str | None = None
    """Why the migration can no longer be committed; None if it can."""
    rests_until: float = 0.0
    """The session is not migrated for balance before this time; set when a migration ends."""
    migration_failures: dict[str, float] = field(default_factory=dict)
    """Worker → time before which no migration to it is tried, because one has failed."""
    must_read: bool = False
    """Whether the known row is in doubt and must be read again."""
    not_before: float = 0.0
    """No command is sent for the session before this time."""
    failures: int = 0
    """Number of failed commands in a row."""
    waiting_since: float | None = None
    """Time since which the session needs a worker; None while it needs none."""
    refused_epoch: int | None = None
    """The epoch that the session's worker refused to run."""
    leaves_epoch: int | None = None
    """The epoch in which the session must leave a draining worker without its state (see `handover`)."""
    refusals: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Worker → number of its refusals of this session, and the time before which it does not get it again."""
    noted: str | None = None
    """The last recorded reason for waiting."""
    changed: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def id(self) -> str:
        return self.record.id

    def is_free(self, now: float) -> bool:
        """Whether a command for the session may be sent at `now`."""
        return self.ticket is None and self.not_before <= now
