"""What the scheduler's core is told, and what it asks for: plain values that can be logged and replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.pool import LoadFeedback
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.contracts.workers import LoadReport, WorkerRecord

# Events


@dataclass(frozen=True)
class Tick:
    """Time passes. `connected`: whether the scheduler can hear its workers at the moment."""

    connected: bool = True


@dataclass(frozen=True)
class SessionChanged:
    """An event of the log says what a session's row was right after a commit. May come late or twice."""

    record: SessionRecord


@dataclass(frozen=True)
class WorkerChanged:
    """An event of the log says what a worker's row was right after a commit. May come late or twice."""

    record: WorkerRecord


@dataclass(frozen=True)
class LoadReported:
    """A worker speaks for itself. May be lost."""

    report: LoadReport


@dataclass(frozen=True)
class ViewersReported:
    """A gateway says how many viewers of a session it has; others may have more. May be lost."""

    session: str
    viewers: int


@dataclass(frozen=True)
class MoveAsked:
    """An operator wants a session elsewhere; answered with `Reply` to the same `request`."""

    request: int
    session: str
    worker: str | None = None
    """None: the one that suits best."""


@dataclass(frozen=True)
class WorkersListed:
    """All workers that are not gone, as the store had them at some time after command `ticket`."""

    ticket: int
    workers: tuple[WorkerRecord, ...]


@dataclass(frozen=True)
class AllListed:
    """All workers that are not gone, and all sessions that have not ended, read after command `ticket`."""

    ticket: int
    workers: tuple[WorkerRecord, ...]
    sessions: tuple[SessionRecord, ...]


class Refused(Enum):
    """How a command failed, as far as it matters for what comes next."""

    CONFLICT = "conflict"
    """The row is not what it was thought to be; nothing was changed."""
    NO_CAPACITY = "no_capacity"
    """The store knows of more sessions there than we do; nothing was changed."""
    WORKER_GONE = "worker_gone"
    NOT_FOUND = "not_found"
    """No such session, or no such worker."""
    STALE_STATE = "stale_state"
    """The log has a chunk that the moved state does not know of; the move is still under way."""
    NOT_SENT = "not_sent"
    """Nobody serves it at the moment; nothing was changed."""
    UNKNOWN = "unknown"
    """No answer in time, or none that can be understood. It may or may not have been done."""


@dataclass(frozen=True)
class Answered:
    """What became of command `ticket`: a row, a refusal, or (both None) done."""

    ticket: int
    record: SessionRecord | None = None
    refused: Refused | None = None


Event = (
    Tick
    | SessionChanged
    | WorkerChanged
    | LoadReported
    | ViewersReported
    | MoveAsked
    | WorkersListed
    | AllListed
    | Answered
)

# Commands. Every one with a ticket is answered exactly once.


class _Decided:
    """Base of commands that carry a decision. No dataclass: it adds no fields."""

    decision: Decision

    @property
    def session(self) -> str:
        return self.decision.session


class _Chosen(_Decided):
    """The decision names a worker."""

    @property
    def worker(self) -> str:
        assert self.decision.worker is not None
        return self.decision.worker


@dataclass(frozen=True)
class Place(_Chosen):
    """One compare-and-set that gives the session to `decision.worker`."""

    ticket: int
    expected_version: int
    decision: Decision
    other_weights: bool = False
    """That worker has other weights than those that made the session's chunks."""


@dataclass(frozen=True)
class BeginMove(_Chosen):
    """One compare-and-set that sends the session to `decision.worker`; it goes on where it is."""

    ticket: int
    expected_version: int
    decision: Decision


@dataclass(frozen=True)
class CommitMove:
    """The state is verified at `worker`, which owns the session from now on."""

    ticket: int
    session: str
    move: int
    worker: str
    next_chunk: int
    digest: str | None
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AbandonMove:
    """The session stays where it is. Done, or the move is over already: answered with the row."""

    ticket: int
    session: str
    move: int
    reason: str
    release: bool = False
    """Its worker has no state of it: a suspended session has no owner from then on."""


@dataclass(frozen=True)
class SuspendIdle:
    ticket: int
    session: str
    expected_version: int


@dataclass(frozen=True)
class Release(_Decided):
    """The session, suspended, has no owner until it is placed again."""

    ticket: int
    expected_version: int
    decision: Decision


@dataclass(frozen=True)
class ReadSession:
    """The truth about one session. A session that has ended may be answered with its row or NOT_FOUND."""

    ticket: int
    session: str


@dataclass(frozen=True)
class DeclareGone:
    ticket: int
    worker: str
    reason: str
    renewed_at: float
    """Of its row, as it was last read."""


@dataclass(frozen=True)
class ListWorkers:
    ticket: int


@dataclass(frozen=True)
class ListAll:
    ticket: int


@dataclass(frozen=True)
class RecordDecision:
    """Keep a decision that changes no row. Not answered."""

    decision: Decision


@dataclass(frozen=True)
class SendFeedback:
    """Tell the autoscaler. Not answered."""

    feedback: LoadFeedback


@dataclass(frozen=True)
class Reply:
    """The answer to `MoveAsked`: the row and the decision, or why not. Not answered."""

    request: int
    record: SessionRecord | None = None
    decision: Decision | None = None
    error: TurboServeError | None = None


OfSession = Place | BeginMove | CommitMove | AbandonMove | Release | SuspendIdle | ReadSession
"""At most one of these is under way per session."""
Command = OfSession | DeclareGone | ListWorkers | ListAll | RecordDecision | SendFeedback | Reply
