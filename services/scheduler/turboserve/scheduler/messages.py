"""Events and commands of the scheduler's core: plain values that can be logged and replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.pool import LoadFeedback, PoolStatus
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.contracts.workers import LoadReport, WorkerRecord
from turboserve.scheduler.placement.quotas import Quotas, ShareProblem

# Events


@dataclass(frozen=True)
class Tick:
    """Time has passed. `connected`: whether the scheduler is connected to the broker."""

    connected: bool = True


@dataclass(frozen=True)
class SessionChanged:
    """An event of the log with a session's row right after a commit. It may be late or repeated."""

    record: SessionRecord


@dataclass(frozen=True)
class WorkerChanged:
    """An event of the log with a worker's row right after a commit. It may be late or repeated."""

    record: WorkerRecord


@dataclass(frozen=True)
class LoadReported:
    """A worker's load report. It may be lost."""

    report: LoadReport


@dataclass(frozen=True)
class PoolReported:
    """An autoscaler's report of its pool, once a second. It may be lost."""

    status: PoolStatus


@dataclass(frozen=True)
class ViewersReported:
    """The number of a session's viewers at one gateway. Other gateways may have more. It may be lost."""

    session: str
    viewers: int


@dataclass(frozen=True)
class MigrationRequested:
    """An operator's request to migrate a session. A `Reply` with the same `request` answers it."""

    request: int
    session: str
    worker: str | None = None
    """The target. None: the placement chooses it."""


@dataclass(frozen=True)
class WorkersListed:
    """All workers that are not gone, read from the store after command `ticket`."""

    ticket: int
    workers: tuple[WorkerRecord, ...]


@dataclass(frozen=True)
class AllListed:
    """All workers that are not gone and all sessions that have not ended, read after command `ticket`."""

    ticket: int
    workers: tuple[WorkerRecord, ...]
    sessions: tuple[SessionRecord, ...]


class Refused(Enum):
    """How a command failed."""

    CONFLICT = "conflict"
    """The row is not as expected; nothing was changed."""
    NO_CAPACITY = "no_capacity"
    """The store counts more sessions on the worker than the view does; nothing was changed."""
    WORKER_GONE = "worker_gone"
    NOT_FOUND = "not_found"
    """There is no such session or no such worker."""
    STALE_STATE = "stale_state"
    """The log has a later chunk than the copied state; the migration is still under way."""
    NOT_SENT = "not_sent"
    """No server takes the request at the moment; nothing was changed."""
    UNKNOWN = "unknown"
    """The answer is missing, late or unreadable. The command may or may not have been carried out."""


@dataclass(frozen=True)
class Answered:
    """The outcome of command `ticket`: the new row, a refusal, or plain success if both are None."""

    ticket: int
    record: SessionRecord | None = None
    refused: Refused | None = None


@dataclass(frozen=True)
class SharesSolved:
    """The outcome of `SolveShares`."""

    ticket: int
    quotas: Quotas | None = None
    """None: they were not found."""
    error: str | None = None
    """Why they were not found."""


Event = (
    Tick
    | SessionChanged
    | WorkerChanged
    | LoadReported
    | PoolReported
    | ViewersReported
    | MigrationRequested
    | WorkersListed
    | AllListed
    | SharesSolved
    | Answered
)

# Commands. Every one with a ticket is answered exactly once.


class _Decided:
    """Base of commands that carry a decision. It is not a dataclass, because it adds no fields."""

    decision: Decision

    @property
    def session(self) -> str:
        return self.decision.session


class _Chosen(_Decided):
    """Base of commands whose decision names a worker."""

    @property
    def worker(self) -> str:
        assert self.decision.worker is not None
        return self.decision.worker


@dataclass(frozen=True)
class Place(_Chosen):
    """Make `decision.worker` the session's owner, by one compare-and-set."""

    ticket: int
    expected_version: int
    decision: Decision
    other_weights: bool = False
    """The worker's weights differ from those that made the session's chunks."""


@dataclass(frozen=True)
class BeginMigration(_Chosen):
    """Begin a migration to `decision.worker`, by one compare-and-set. The owner keeps running the session."""

    ticket: int
    expected_version: int
    decision: Decision


@dataclass(frozen=True)
class CommitMigration:
    """Make `worker`, where the state is verified, the session's owner."""

    ticket: int
    session: str
    migration: int
    worker: str
    next_chunk: int
    digest: str | None
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AbandonMigration:
    """End a migration; the session keeps its owner. Succeeds also if the migration is already over."""

    ticket: int
    session: str
    migration: int
    reason: str
    release: bool = False
    """The owner has no state of the session. If the session is suspended, its row then has no owner."""


@dataclass(frozen=True)
class SuspendIdle:
    """Suspend a session without viewers."""

    ticket: int
    session: str
    expected_version: int


@dataclass(frozen=True)
class Release(_Decided):
    """Take the owner from a suspended session. The session has no owner until it is placed again."""

    ticket: int
    expected_version: int
    decision: Decision


@dataclass(frozen=True)
class ReadSession:
    """Read one session's row. For an ended session the answer is the row or `NOT_FOUND`."""

    ticket: int
    session: str


@dataclass(frozen=True)
class DeclareGone:
    """Declare a silent worker gone."""

    ticket: int
    worker: str
    reason: str
    renewed_at: float
    """`renewed_at` of the worker's row as last read."""


@dataclass(frozen=True)
class ListWorkers:
    """Read all workers that are not gone."""

    ticket: int


@dataclass(frozen=True)
class ListAll:
    """Read all workers that are not gone and all sessions that have not ended."""

    ticket: int


@dataclass(frozen=True)
class SolveShares:
    """Solve the shares of classes, beside the event loop. `SharesSolved` answers it."""

    ticket: int
    problems: tuple[ShareProblem, ...]


@dataclass(frozen=True)
class RecordDecision:
    """Store a decision that changes no row. It has no answer."""

    decision: Decision


@dataclass(frozen=True)
class SendFeedback:
    """Publish load feedback for the autoscaler. It has no answer."""

    feedback: LoadFeedback


@dataclass(frozen=True)
class Reply:
    """The answer to `MigrationRequested`: the row and the decision, or an error. It has no answer itself."""

    request: int
    record: SessionRecord | None = None
    decision: Decision | None = None
    error: TurboServeError | None = None


OfSession = Place | BeginMigration | CommitMigration | AbandonMigration | Release | SuspendIdle | ReadSession
"""Commands about one session. At most one per session is under way."""
Command = (
    OfSession | DeclareGone | ListWorkers | ListAll | SolveShares | RecordDecision | SendFeedback | Reply
)
