"""What the session table wants done. The shell carries commands out in the order in which they are given."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.worker.service.events import Ownership


@dataclass(frozen=True)
class ReadLogEnd:
    """Read the last entry of `chunk.<session>`; answer with `LogEndRead`."""

    session: str
    query: int


@dataclass(frozen=True)
class FetchLatents:
    """Fetch the kept latents of the newest chunks before `next_chunk`; answer with `LatentsFetched`."""

    session: str
    run: int
    query: int
    next_chunk: int
    epoch: int
    """Of the newest chunk in the log: latents of its index, but another epoch, are of one that nobody saw."""


@dataclass(frozen=True)
class Admit:
    """Give the session a slab and start it at `next_chunk`, from the fetched latents where that is not 0."""

    session: str
    run: int
    next_chunk: int
    prompt: str
    seed: int
    control_seq: int
    playhead_s: float
    isolated: bool = False
    """A device may have failed of its input: its first chunks are computed while nothing else is."""


@dataclass(frozen=True)
class Evict:
    """Let go of all memory of this run, on device and host, and of its unpublished chunks."""

    session: str
    run: int


@dataclass(frozen=True)
class Suspend:
    """Move the state to host memory at the next chunk boundary."""

    session: str
    run: int


@dataclass(frozen=True)
class Resume:
    """Move the state back into a slab and go on."""

    session: str
    run: int
    playhead_s: float


@dataclass(frozen=True)
class PauseGeneration:
    """Keep the state where it is, but generate no further chunk."""

    session: str
    run: int
    control_seq: int


@dataclass(frozen=True)
class ResumeGeneration:
    session: str
    run: int
    control_seq: int


@dataclass(frozen=True)
class Quiesce:
    """Have it stand still at a chunk boundary at which no viewer waits; answer with `Quiesced`."""

    session: str
    run: int
    number: int
    """Of this wish: the answer to an earlier one, which was taken back, means nothing."""


@dataclass(frozen=True)
class Unquiesce:
    """Go on, from where it stands still."""

    session: str
    run: int


@dataclass(frozen=True)
class SendFinalDelta:
    """It stands still: its target may have the rest of its state."""

    session: str
    move: int


@dataclass(frozen=True)
class SendManifest:
    """The log has all chunks before this one: its target may have the seal."""

    session: str
    move: int
    next_chunk: int


@dataclass(frozen=True)
class CancelTransfer:
    """Give nothing more to the target."""

    session: str


@dataclass(frozen=True)
class FetchState:
    """Keep memory for the session, and copy its state into it; answer with `Arrived` or
    `StateFetchFailed`."""

    session: str
    run: int
    move: int
    source: tuple[str, ...]
    """Where it is to be had."""
    on_host: bool


@dataclass(frozen=True)
class CancelFetch:
    """End the copy, and let go of what it has brought."""

    session: str
    run: int


@dataclass(frozen=True)
class SetPrompt:
    """Take effect at the next chunk boundary."""

    session: str
    run: int
    control_seq: int
    prompt: str


@dataclass(frozen=True)
class SetPlayhead:
    session: str
    run: int
    playhead_s: float
    playing: bool
    age_s: float = 0.0
    """It was there so long ago, and has played on since."""


@dataclass(frozen=True)
class PublishChunk:
    """Append the packaged chunk through the fence; answer with `Published`, whatever happens."""

    session: str
    run: int
    index: int
    ownership: Ownership
    began: int
    """See `ChunkHeader`."""


@dataclass(frozen=True)
class PublishLatents:
    """Send the chunk's clean latents to the hot store, for whoever has to go on after us."""

    session: str
    run: int
    index: int
    epoch: int
    began: int
    before: int
    """See `LatentsHeader`."""


@dataclass(frozen=True)
class ForgetChunk:
    """The packaged chunk is not needed any more."""

    session: str
    run: int
    index: int


@dataclass(frozen=True)
class FailSession:
    """Tell the state store that the session cannot go on."""

    session: str
    epoch: int
    reason: str


@dataclass(frozen=True)
class StopGenerating:
    """The lease is over: make nothing until the next `GenerateUntil`."""


@dataclass(frozen=True)
class GenerateUntil:
    """Make chunks, and begin no work on them once the monotonic clock says `until`.

    The engine looks at the clock itself: a process that stood still goes on with whatever is due first, and
    that may be its next step rather than our word that the lease is over.
    """

    until: float


@dataclass(frozen=True)
class Report:
    """Renew and send a load report at once: what we hold has changed, or we need to hear the truth."""


Command = (
    ReadLogEnd
    | FetchLatents
    | Admit
    | Evict
    | Suspend
    | Resume
    | PauseGeneration
    | ResumeGeneration
    | Quiesce
    | Unquiesce
    | SendFinalDelta
    | SendManifest
    | CancelTransfer
    | FetchState
    | CancelFetch
    | SetPrompt
    | SetPlayhead
    | PublishChunk
    | PublishLatents
    | ForgetChunk
    | FailSession
    | StopGenerating
    | GenerateUntil
    | Report
)
