"""Events of the session table. Each may come late, twice, out of order, or never, unless it says otherwise.

`run` numbers one engine run of a session. Events of an earlier run are stale and are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import Incoming, MigrationKey
from turboserve.static_frozen import statically_frozen

LogPlace = tuple[int, int]
"""(index, stream sequence) of a chunk in the log."""
Ownership = tuple[int, int]
"""(epoch, own_revision): the number of an ownership and its place in the log."""


@dataclass(frozen=True)
class Renewed:
    """The state store answered a renewal: `records` are all rows that name this worker."""

    asked_at: float
    """When the renewal was sent, monotonic seconds. What was learned later is newer than the answer."""
    records: tuple[SessionRecord, ...]
    drain: bool = False
    incoming: tuple[Incoming, ...] = ()
    """All sessions that are migrating to this worker."""
    keys: tuple[MigrationKey, ...] = ()
    """Keys of all sessions that migrate to or from this worker."""


@dataclass(frozen=True)
class RenewalUnavailable:
    """The state store or its database cannot be reached. No session can be reassigned either."""

    asked_at: float


@dataclass(frozen=True)
class Assigned:
    """A row that names or named this worker has changed."""

    record: SessionRecord
    incoming: Incoming | None = None
    """For the target of a migration: where it fetches the state."""
    key: MigrationKey | None = None
    """The migration's key, while the session migrates."""


@statically_frozen()
class PlayheadMoved:
    """Playback of a session has reached this media time, seconds."""

    session: str
    playhead_s: float
    playing: bool = True
    """Whether a viewer watches, so that the playhead advances with time."""
    observed_at: float | None = None
    """When the viewer was at `playhead_s`, monotonic seconds. None: now."""


@dataclass(frozen=True)
class LogEndRead:
    """Where the session's chunk log ends. Answers `ReadLogEnd`; never comes if the run was evicted."""

    session: str
    query: int
    next_chunk: int
    mine: bool
    """Whether this worker wrote the last entry; False for an empty log."""
    epoch: int = 0
    """Epoch of the last entry; 0 for an empty log."""
    contiguous_from: int = 0
    """`contiguous_from` of the last entry; 0 for an empty log."""
    sequence: int = 0
    """Stream sequence of the last entry; 0 for an empty log."""
    known_lost: bool = False
    """Whether the log does not have the entry that `ReadLogEnd` names."""
    control_seq: int = 0
    """Number of the control of the last entry; 0 for an empty log."""


@dataclass(frozen=True)
class LatentsFetched:
    """The session's remaining latents are fetched, or are known to be lost. Answers `FetchLatents`."""

    session: str
    query: int


@statically_frozen()
class ChunkPackaged:
    """A chunk of the engine is packaged. Comes in order within a run."""

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
    """The engine has no free slab. Answers `Admit` (no state here) or `Resume` (state on the host)."""

    session: str
    run: int
    reason: str
    on_host: bool


@dataclass(frozen=True)
class QuiesceRequested:
    """The target of the migration has the bulk of the state and waits for the rest."""

    session: str
    migration: int


@dataclass(frozen=True)
class Quiesced:
    """The session is quiesced before chunk `next_chunk`. Answers the `Quiesce` with this number."""

    session: str
    run: int
    next_chunk: int
    number: int


@dataclass(frozen=True)
class ManifestSent:
    """From now on the target may have the complete state. Comes before the manifest is sent."""

    session: str
    migration: int


@dataclass(frozen=True)
class TransferEnded:
    """The transfer attempt has ended, with or without the whole state."""

    session: str
    migration: int


@dataclass(frozen=True)
class CopyStarted:
    """Memory is reserved for a state, and the copy begins. Follows `FetchState`."""

    session: str
    run: int
    limit_s: float
    """Time after which the copy is given up, seconds."""


@dataclass(frozen=True)
class StateReceived:
    """A fetched state is verified; its session is quiesced, or on the host. Answers `FetchState`."""

    session: str
    run: int
    next_chunk: int
    control_seq: int
    digest: str
    bytes_copied: int
    seconds: float
    state_bytes: int = 0


@dataclass(frozen=True)
class StateFetchFailed:
    """A state could not be fetched, and no part of it is kept. Answers `FetchState`."""

    session: str
    run: int
    reason: str
    code: str | None = None
    """Code of the error."""


@dataclass(frozen=True)
class RunFailed:
    """This run cannot continue; the engine has released it."""

    session: str
    run: int
    reason: str


@dataclass(frozen=True)
class RunFinished:
    """The model cannot represent more of this session: the session ends once its chunks are published."""

    session: str
    run: int
    reason: str


class PublishOutcome(Enum):
    """Outcome of a publication."""

    ACKED = "acked"
    """The chunk is in the log, written by this worker."""
    FENCED = "fenced"
    """The broker refused the chunk, or the log has another worker's chunk of this index."""
    UNKNOWN = "unknown"
    """No answer: the chunk may be in the log or not."""


@statically_frozen()
class Published:
    """Outcome of a `PublishChunk`. Exactly one for each."""

    session: str
    run: int
    index: int
    ownership: Ownership
    outcome: PublishOutcome
    sequence: int = 0
    """Stream sequence of the chunk, if the outcome is `ACKED`."""
    duplicate: bool = False
    """Whether the log had the chunk already, with the header of an earlier attempt."""
    control_seq: int = 0
    """Number of the chunk's control."""


@dataclass(frozen=True)
class Tick:
    """Time has passed. Comes several times a second."""


@dataclass(frozen=True)
class Reconnected:
    """This process has a new connection to the broker, which may have lost the end of its log meanwhile."""


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
"""Events of one session."""
Input = SessionInput | Renewed | RenewalUnavailable | Assigned | Tick | Reconnected
