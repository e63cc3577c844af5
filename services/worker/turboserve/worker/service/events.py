"""What the session table is told. Each may come late, twice, out of order, or never, unless it says so.

`run` numbers one stay of a session in the engine: what belongs to an earlier run is stale and means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import Incoming, MigrationKey

Ownership = tuple[int, int]
"""(epoch, own_revision): the number of an ownership and its place in the log."""


@dataclass(frozen=True)
class Renewed:
    """The state store answered a renewal: these are all rows that name this worker."""

    asked_at: float
    """When the renewal was sent, monotonic seconds: what was learned later is newer than the answer."""
    records: tuple[SessionRecord, ...]
    drain: bool = False
    incoming: tuple[Incoming, ...] = ()
    """All sessions that are moving here."""
    keys: tuple[MigrationKey, ...] = ()
    """Of all sessions that migrate to or from here."""


@dataclass(frozen=True)
class RenewalUnavailable:
    """No state store is there to renew with, or it says that its database is away: so nobody can give our
    sessions to another worker either."""

    asked_at: float


@dataclass(frozen=True)
class Assigned:
    """A row that names or named this worker has changed."""

    record: SessionRecord
    incoming: Incoming | None = None
    """For the target of a move: where the state is to be had."""
    key: MigrationKey | None = None
    """While the session migrates."""


@dataclass(frozen=True)
class PlayheadMoved:
    """Playback of a session has reached this media time, seconds."""

    session: str
    playhead_s: float
    playing: bool = True
    """Whether anybody watches, so that it moves on by itself."""


@dataclass(frozen=True)
class LogEndRead:
    """Where the session's chunk log ends. Answers `ReadLogEnd`; never comes if the run was evicted."""

    session: str
    query: int
    next_chunk: int
    mine: bool
    """Whether this worker wrote the last entry; False for an empty log."""
    epoch: int = 0
    """Of the last entry; 0 for an empty log."""


@dataclass(frozen=True)
class LatentsFetched:
    """What is left of the session's latents is here, or is known to be lost. Answers `FetchLatents`."""

    session: str
    query: int


@dataclass(frozen=True)
class ChunkPackaged:
    """The engine made a chunk and it is packaged. In order within a run."""

    session: str
    run: int
    index: int
    control_seq: int


@dataclass(frozen=True)
class ControlTookEffect:
    """A control took effect in the engine."""

    session: str
    run: int
    control_seq: int


@dataclass(frozen=True)
class MovedToHost:
    """The session's state is in host memory and its slab is free. Answers `Suspend`."""

    session: str
    run: int
    next_chunk: int


@dataclass(frozen=True)
class SuspendFailed:
    """Host memory is full: the state stayed in its slab. Answers `Suspend`."""

    session: str
    run: int
    reason: str


@dataclass(frozen=True)
class AdmissionRefused:
    """The engine has no room after all. Answers `Admit` (state nowhere) or `Resume` (state on the host)."""

    session: str
    run: int
    reason: str
    on_host: bool


@dataclass(frozen=True)
class QuiesceRequested:
    """The target of its move has the bulk of its state, and waits for the rest."""

    session: str
    move: int


@dataclass(frozen=True)
class Quiesced:
    """The session stands still before this chunk. Answers the `Quiesce` of this number."""

    session: str
    run: int
    next_chunk: int
    number: int


@dataclass(frozen=True)
class ManifestSent:
    """From now on the target has all that it needs. Told before that is so."""

    session: str
    move: int


@dataclass(frozen=True)
class TransferEnded:
    """The target has hung up, or was given all there is."""

    session: str
    move: int


@dataclass(frozen=True)
class CopyStarted:
    """Memory is kept for a state, and the copy begins. Follows `FetchState`."""

    session: str
    run: int
    limit_s: float
    """The copy is given up after this long."""


@dataclass(frozen=True)
class StateReceived:
    """A state that was fetched is here, verified; it stands still, or is on the host. Answers
    `FetchState`."""

    session: str
    run: int
    next_chunk: int
    control_seq: int
    digest: str
    bytes_moved: int
    seconds: float
    state_bytes: int = 0


@dataclass(frozen=True)
class StateFetchFailed:
    """A state could not be fetched, and nothing of it is here. Answers `FetchState`."""

    session: str
    run: int
    reason: str
    code: str | None = None
    """Code of the error."""


@dataclass(frozen=True)
class RunFailed:
    """This run cannot go on; the engine has let go of it."""

    session: str
    run: int
    reason: str


@dataclass(frozen=True)
class RunFinished:
    """The model can represent no more of this session: it ends once its chunks are published."""

    session: str
    run: int
    reason: str


class PublishOutcome(Enum):
    """What became of a publication."""

    ACKED = "acked"
    """The chunk is in the log, by this worker's hand."""
    FENCED = "fenced"
    """The broker refused it, or another worker's chunk of this index is there."""
    UNKNOWN = "unknown"
    """No answer: it may be in the log or not."""


@dataclass(frozen=True)
class Published:
    """What became of a `PublishChunk`. Exactly one for each."""

    session: str
    run: int
    index: int
    ownership: Ownership
    outcome: PublishOutcome


@dataclass(frozen=True)
class Tick:
    """Time has passed; several a second."""


TransferEvent = QuiesceRequested | Quiesced | ManifestSent | TransferEnded
SessionInput = (
    PlayheadMoved
    | QuiesceRequested
    | Quiesced
    | ManifestSent
    | TransferEnded
    | CopyStarted
    | StateReceived
    | StateFetchFailed
    | LogEndRead
    | LatentsFetched
    | ChunkPackaged
    | ControlTookEffect
    | MovedToHost
    | SuspendFailed
    | AdmissionRefused
    | RunFailed
    | RunFinished
    | Published
)
"""About one session."""
Input = SessionInput | Renewed | RenewalUnavailable | Assigned | Tick
