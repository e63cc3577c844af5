"""Events of the engine for the service, in the order in which they happened."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from turboserve.worker.engine.fidelity import Fidelity


@dataclass(frozen=True, slots=True)
class Step:
    """One batch that computed for a chunk. Times are monotonic seconds on the engine's clock."""

    stage: str
    """`text`, `denoise`, `recache`, `replay`, `decode` or `package`."""
    began_s: float
    ended_s: float
    sessions: tuple[str, ...]
    """The sessions of the batch, the chunk's own included."""


@dataclass(frozen=True)
class ChunkTimings:
    """Times of a chunk, monotonic seconds on the engine's clock."""

    due_s: float
    """When the session was allowed to generate the chunk."""
    started_s: float
    """When its first forward was gathered."""
    denoised_s: float
    """When its latents were clean."""
    ready_s: float
    """When its frames were decoded."""
    decode_s: float = 0.0
    """Duration of its decoding, seconds."""
    steps: tuple[Step, ...] = ()
    """The batches up to its clean latents, if the engine records them (`Engine.records_steps`)."""


@dataclass(frozen=True, eq=False)
class ChunkReady:
    """A chunk is generated and decoded. The service encodes and publishes it."""

    session: str
    index: int
    latents: Tensor
    """Clean latents [F, C, H, W] on the host, for a rebuild on another worker."""
    frames: Tensor
    """Pixel frames, uint8 [N, H, W, 3] on the host."""
    control_seq: int
    """Number of the last control applied before this chunk."""
    media_start_s: float
    """Seconds of video before the chunk's first frame."""
    timings: ChunkTimings
    fidelity: Fidelity | None = None
    """Configuration of the chunk. None: the best."""


@dataclass(frozen=True)
class ControlApplied:
    """A control took effect; `chunk` is the first chunk that shows it."""

    session: str
    control_seq: int
    chunk: int


@dataclass(frozen=True)
class SessionReady:
    """An admitted or resumed session has its prompt and cache. It generates `next_chunk` when that is due."""

    session: str
    next_chunk: int


@dataclass(frozen=True)
class Suspended:
    """A session's state is on the host and its slab is free. `host_bytes` is the state's size there."""

    session: str
    next_chunk: int
    host_bytes: int


@dataclass(frozen=True)
class SuspendRefused:
    """The host pool has no room: the session stays as it was."""

    session: str
    reason: str


@dataclass(frozen=True)
class SessionQuiesced:
    """The session is quiesced between two chunks until it is unquiesced or evicted."""

    session: str
    next_chunk: int
    number: int = 0
    """Number of the `QuiesceRequest`."""


@dataclass(frozen=True)
class SessionEnded:
    """The model cannot represent more frames in this session. It keeps its slab until it is evicted."""

    session: str
    reason: str


@dataclass(frozen=True)
class SessionFailed:
    """Computing for this session raised an error; the engine has evicted it. Others are not affected."""

    session: str
    error: str


Event = (
    ChunkReady
    | ControlApplied
    | SessionReady
    | Suspended
    | SuspendRefused
    | SessionQuiesced
    | SessionEnded
    | SessionFailed
)
