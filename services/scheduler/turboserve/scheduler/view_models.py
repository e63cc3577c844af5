"""One worker and one session as the scheduler knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import MoveReport, WorkerPhase

NOISE = 0.1
"""A measured latency that differs by less than this part from the one in use is the same one: workers refine
their profiles with every chunk, and a session must not be moved after their noise."""


class ChangeTracked:
    """Says so whenever one of the fields in `TRACKED_FIELDS` is set, so that who keeps a picture of it has to
    look only at what has changed. What is changed in place inside of a field is not noticed."""

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
    """Listening time (see `liveness`) at which it was surely alive."""
    looked_at: float
    """Listening time at which the newest read of its row was asked for."""
    renewed_at: float
    """Its row's `renewed_at`; only ever compared with itself."""
    renewal_seen_at: float = 0.0
    """Listening time at which a read first showed its newest renewal."""
    known_since: int = 0
    """Stamp of its creation here."""
    draining: bool = False
    started_at: float = 0.0
    """When its process started, wall-clock seconds; only ever compared with itself."""
    gone: bool = False
    host: str = ""
    weights_digest: str | None = None
    """None: not known (yet)."""
    provides_state: bool = False
    """Other workers can ask it for the state of sessions."""
    chunk_latency_s: dict[int, float] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    """Sessions whose rows hold a slot here."""
    reserved: set[str] = field(default_factory=set)
    """Sessions that were decided to go here; the decision is not confirmed yet."""
    incoming: set[str] = field(default_factory=set)
    """Sessions whose rows say that they are moving here, and that need a slot."""
    arrivals: dict[str, MoveReport] = field(default_factory=dict)
    """What it last said of the sessions that are moving here."""
    holding: set[str] = field(default_factory=set)
    """Suspended sessions whose rows name this worker."""
    full_until: float = 0.0
    """The store said it is full when we thought otherwise; not before this time again."""
    declaring: bool = False
    """It is being declared gone."""
    declare_after: float = 0.0
    """It is not declared gone (again) before this time."""
    changed: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def load(self) -> int:
        """Sessions that hold a slot, are moving here or have a slot reserved, each once."""
        return len(self.used | self.reserved | self.incoming)

    def measured(self, chunk_latency_s: Mapping[int, float]) -> None:
        """Take over a profile (seconds of a chunk by sessions at once), where it says something new."""
        known = self.chunk_latency_s
        if chunk_latency_s and (
            chunk_latency_s.keys() != known.keys()
            or any(abs(seconds - known[b]) > NOISE * known[b] for b, seconds in chunk_latency_s.items())
        ):
            self.chunk_latency_s = dict(chunk_latency_s)

    @property
    def ready(self) -> bool:
        """Whether it may be given sessions."""
        return self.phase is WorkerPhase.READY and not self.draining and not self.declaring


@dataclass
class SessionView(ChangeTracked):
    """One session that has not ended."""

    # `refusals` and `move_failures` change in place, together with `refused_epoch` and `rests_until`.
    TRACKED_FIELDS = frozenset(
        {"record", "must_read", "reserved_on", "begun_to", "ticket", "not_before"}
        | {"rests_until", "refused_epoch"}
    )

    record: SessionRecord
    touched: int
    """Stamp of the last time something was learnt about the row."""
    watched_at: float
    """Listening time at which it last had a viewer, or was first wanted."""
    ticket: int | None = None
    """The one command under way for it."""
    reserved_on: str | None = None
    begun_to: str | None = None
    """Target of a move that was decided and is not confirmed yet."""
    move_seen: int | None = None
    """The move that the next three are about."""
    move_since: float = 0.0
    """Listening time at which it was first seen, or its target first said that it copies."""
    move_limit_s: float | None = None
    """How long after that it is given up; None: its target has not said yet how long it will try."""
    move_doomed: str | None = None
    """Why it cannot be committed any more."""
    rests_until: float = 0.0
    """It has moved, or failed to: not moved for balance before this time."""
    move_failures: dict[str, float] = field(default_factory=dict)
    """Worker → until when no move there is tried, since one has failed."""
    must_read: bool = False
    """What we know of its row is doubtful."""
    not_before: float = 0.0
    """No command for it before this time."""
    failures: int = 0
    """Commands in a row that failed."""
    waiting_since: float | None = None
    """When it came to need a worker; None while it has one or wants none."""
    refused_epoch: int | None = None
    """The epoch that its worker refused to run."""
    leaves_epoch: int | None = None
    """The epoch of a worker that is to be emptied and cannot give the state to any other."""
    refusals: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Worker → how often it refused this session, and until when it is not asked again."""
    noted: str | None = None
    """The reason for waiting that was last noted."""
    changed: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def id(self) -> str:
        return self.record.id

    def is_free(self, now: float) -> bool:
        """Whether a command for it may be given."""
        return self.ticket is None and self.not_before <= now
