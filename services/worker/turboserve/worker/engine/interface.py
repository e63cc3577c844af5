"""What goes into the engine and comes out of it: sessions, controls, models' protocols, and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from turboserve.static_frozen import statically_frozen
from turboserve.worker.engine.fidelity import AttentionName, Fidelity
from turboserve.worker.engine.gather import ALPHA

if TYPE_CHECKING:
    from pydantic import JsonValue


class TextEncoder(Protocol):
    """Encodes prompts for the transformer's cross-attention."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the encoder's weights on the device."""

    @property
    def workspace_bytes(self) -> int:
        """Temporary memory of encoding one prompt, bytes."""
        ...

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings [prompts, L, text_dim], L ≤ text_len, padding zeroed, on the engine's device."""
        ...


class Decoder(Protocol):
    """A streaming causal VAE decoder. It holds no session: a session's cache is an input and an output."""

    cache_bytes: int
    """Bytes of one session's cache on the device."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the decoder's weights on the device."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """Temporary memory of decoding one session's latents beside its cache, bytes."""
        ...

    def decode(
        self, latents: Tensor, caches: Sequence[dict[str, Tensor]] | None
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Decode latents of several sessions [B, F, C, h, w]. Returns their frames, uint8 [B, N, H, W, 3],
        and each session's cache for its next call.

        Without caches all sessions begin a video, and the first latent frame gives one pixel frame; every
        other gives `frames_per_latent`. The given caches are not changed, so that a failed call can be
        repeated. The returned caches share no memory. A session's result depends on the others by rounding
        only: a convolution over more rows may be blocked differently.
        """
        ...


@dataclass(frozen=True, eq=False)
class Rebuild:
    """The remaining latents of a lost session: one pass over the newest lets the session continue."""

    next_chunk: int
    """Index of the chunk to continue with."""
    latents: Tensor
    """Clean latents of the chunks before `next_chunk`, [chunks·frames_per_chunk, C, H, W], oldest first."""
    sink: Tensor | None = None
    """Clean latents of the session's first frames, [sink_size, C, H, W], where they were kept. Without them
    the oldest given latents become the sink."""
    fidelities: tuple[Fidelity | None, ...] = ()
    """Configuration of each of these chunks, with which its clean pass is repeated. Empty: all the best."""
    sink_fidelity: Fidelity | None = None
    """Configuration of chunk 0, with which the sink's clean pass is repeated. None: the best."""


@dataclass(frozen=True, eq=False)
class SessionSpec:
    """A session to run."""

    session: str
    prompt: str
    seed: int = 0
    control_seq: int = 0
    """Number of the control that set `prompt` or `values` last; 0 if the session began with them."""
    rebuild: Rebuild | None = None
    playhead_s: float = 0.0
    """Seconds of video already played."""
    fidelity: Fidelity | None = None
    """Configuration of its chunks. None: the best."""
    floor: float | None = None
    """Least quality of a chunk, relative to the best configuration's. None: the floor of the profile."""
    pinned: bool = False
    """Whether every chunk is generated at the best configuration."""
    max_lead_s: float | None = None
    """Largest lead of the session, seconds; at least one chunk. None: `EngineOptions.max_lead_s`."""
    waiting_s: float | None = None
    """Age of the request that the session's next chunk is the first to answer, seconds. None: the chunk
    answers no request, or the session is new and its request is made now."""
    drops_buffer: bool = False
    """Whether viewers discard the video before the session's next chunk."""
    isolated_chunks: int = 0
    """Number of first chunks that are computed in separate batches, while nothing else computes."""
    values: Mapping[str, JsonValue] = field(default_factory=dict)
    """Values of the model's controls, by name. Those that its declarations do not allow are left out."""


@dataclass(frozen=True)
class Control:
    """A change at the session's next chunk boundary. Fields that are None change nothing."""

    control_seq: int
    """Number of this control within its session, increasing. `ControlApplied` carries it."""
    prompt: str | None = None
    values: Mapping[str, JsonValue] | None = None
    """Values of all controls: one that is not here has the model's own. See `SessionSpec.values`."""
    paused: bool | None = None
    seed: int | None = None
    max_lead_s: float | None = None
    """At least one chunk."""
    drops_buffer_since_s: float | None = None
    """Viewers discard the video before the first chunk under this control. When that was requested, monotonic
    seconds on the engine's clock."""
    fidelity: Fidelity | None = None
    floor: float | None = None
    """See `SessionSpec.floor`. 0 leaves only the floor of the profile."""
    pinned: bool | None = None


@dataclass(frozen=True)
class EngineOptions:
    """How the engine runs. All sizes in bytes, all times in seconds."""

    slab_bytes: int
    """Device memory for sessions' keys and values."""
    host_bytes: int = 1 << 30
    """Host memory for suspended sessions."""
    host_sessions: int = 0
    """Number of active sessions beyond the slabs. Their states take turns in the slabs and wait in host
    memory, which is beside `host_bytes`. 0: none."""
    max_lead_s: float = 3.0
    """Largest lead: a session generates no chunk that starts further ahead of its playhead."""
    max_batch: int = 16
    """Largest number of rows of one forward."""
    decode_batch: int = 1
    """Largest number of sessions decoded at once; the decoder's profile chooses the number. Each takes the
    decoder's workspace once more. With 1 the same latents give the same frames bit for bit, whatever else is
    decoded."""
    tier_alpha: float = ALPHA
    """Width of a tier, as a multiple of T."""
    policy: str = "step"
    """Gather policy: one of `gather.GATHER_POLICIES`."""
    fidelity: str = "best"
    """Policy of configurations: one of `fidelity_policy.FIDELITY_POLICIES`."""
    decode_apart: bool = False
    """Whether sessions' states have no decoder's caches: other workers decode (`decoding_apart`)."""
    overlap: bool = False
    """Decode and copy states on separate threads while others compute. If off, it happens in `step`."""
    attention: AttentionName = "rows"
    compile: bool = False
    """Fuse the operations between two attentions with torch's compiler. The first forwards take a minute
    longer, and a CPU needs a C++ compiler."""
    playhead_trust_s: float = 3.0
    """Longest time for which a playhead is extrapolated after the viewer was observed there, seconds. Viewer
    and gateway together may take twice `LONGEST_INTERVAL_S` to report the next one."""


@dataclass(frozen=True, slots=True)
class Step:
    """One batch that computed for a chunk. Times are monotonic seconds on the engine's clock."""

    stage: str
    """`text`, `denoise`, `recache` or `replay`."""
    began_s: float
    ended_s: float
    sessions: tuple[str, ...]
    """The sessions of the batch, the chunk's own included."""


@statically_frozen()
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

    def decoded(self, ready_s: float, decode_s: float) -> ChunkTimings:
        """Return the same with the end and the duration of its decoding."""
        return ChunkTimings(self.due_s, self.started_s, self.denoised_s, ready_s, decode_s, self.steps)


@statically_frozen(eq=False)
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
    lowered: bool = False
    """Whether the load of the worker is why it is below the best. It is not where a client has set the
    configuration, nor where a viewer had nothing to play."""


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
