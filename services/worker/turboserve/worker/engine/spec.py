"""What the service tells the engine, and what the models give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


class TextEncoder(Protocol):
    """Turns prompts into what the transformer's cross-attention reads."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights on the device."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """What one prompt takes for a moment while it is encoded."""
        ...

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings [prompts, L, text_dim], L ≤ text_len, padding zeroed, on the engine's device."""
        ...


class Decoder(Protocol):
    """A streaming causal VAE decoder. It holds no session: a session's cache goes in and comes out."""

    cache_bytes: int
    """Bytes of one session's cache on the device."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights on the device."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """What decoding one session's latents takes for a moment beside its cache."""
        ...

    def decode(
        self, latents: Tensor, caches: Sequence[dict[str, Tensor]] | None
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Latents of several sessions [B, F, C, h, w] → their frames, uint8 [B, N, H, W, 3], and each one's
        cache for its next call.

        Without caches all of them begin a video, and the first latent frame gives one pixel frame; every
        other gives `frames_per_latent`. The given caches are not changed, so that a failed call can be
        repeated, and those returned share no memory. What a session gets does not depend on the others but
        for rounding: a convolution over more rows may be blocked differently.
        """
        ...


@dataclass(frozen=True, eq=False)
class Rebuild:
    """What is left of a session whose worker died: enough to go on with one pass over its newest latents."""

    next_chunk: int
    """The chunk to continue with."""
    latents: Tensor
    """Clean latents of the newest chunks before it, [chunks·frames_per_chunk, C, H, W], oldest first."""
    sink: Tensor | None = None
    """Clean latents of the session's first frames, [sink_size, C, H, W], where they were kept. Without them
    the oldest given latents become the sink."""


@dataclass(frozen=True, eq=False)
class SessionSpec:
    """A session to run."""

    session: str
    prompt: str
    seed: int = 0
    control_seq: int = 0
    """Number of the control that set `prompt`; 0 when the session began with it."""
    rebuild: Rebuild | None = None
    playhead_s: float = 0.0
    """Seconds of video already played."""
    isolated_chunks: int = 0
    """Its first chunks here that are computed in batches of their own, while nothing else computes."""


@dataclass(frozen=True)
class Control:
    """A change that takes effect at the session's next chunk boundary. Fields that are None change
    nothing."""

    control_seq: int
    """Number of this control within its session, rising; the receipt carries it."""
    prompt: str | None = None
    paused: bool | None = None
    seed: int | None = None
    max_lead_s: float | None = None


@dataclass(frozen=True)
class EngineOptions:
    """How the engine runs. All sizes in bytes, all times in seconds."""

    slab_bytes: int
    """Memory of the device for sessions' keys and values."""
    host_bytes: int = 1 << 30
    """Memory of the host for suspended sessions."""
    max_lead_s: float = 3.0
    """A session generates no chunk that starts further ahead of its playhead."""
    max_batch: int = 16
    """Rows of one forward at most."""
    decode_batch: int = 1
    """Sessions' chunks that are decoded at once at most; how many are, the decoder's profile says. Each takes
    the decoder's workspace once more. With 1 the same latents give the same pictures bit for bit, whatever
    else is decoded."""
    policy: str = "step"
    """Gather policy: one of `gather.GATHER_POLICIES`."""
    overlap: bool = False
    """Decode, and move state to the host and back, on threads of their own while others compute. Without, all
    of it happens in `step`."""
    attention: Literal["rows", "flash", "cudnn", "varlen"] = "rows"
    """See `attention.KINDS`."""
    compile: bool = False
    """Have torch's compiler fuse what lies between two attentions. Takes a minute at the first forwards, and
    a C++ compiler on a CPU."""
    playhead_trust_s: float = 2.0
    """A playhead is taken to have moved on since it was last reported, for this long at most."""
