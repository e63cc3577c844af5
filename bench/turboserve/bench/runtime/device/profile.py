"""What a virtual device is declared to do: latencies by batch size, memory, and how finely time passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from turboserve.worker.engine.profile import LatencyProfile
from turboserve.worker.model.config import ModelConfig


@dataclass(frozen=True)
class _ChunkAtOnce(ModelConfig):
    """A chunk is one forward that takes as long as all of its forwards."""

    @property
    def chunk_forwards(self) -> int:
        return 1


@dataclass(frozen=True)
class DeviceProfile:
    """Latencies in seconds by batch size: linear between the given sizes, and beyond them."""

    forward_s: Mapping[int, float] = field(default_factory=lambda: {1: 0.03, 4: 0.06})
    """One forward of that many sessions."""
    decode_s: Mapping[int, float] = field(default_factory=lambda: {1: 0.02})
    """That many sessions' chunks, beside the forwards."""
    text_s: Mapping[int, float] = field(default_factory=lambda: {1: 0.01})
    """That many prompts."""
    recache_s: Mapping[int, float] = field(default_factory=lambda: {1: 0.05})
    """A prompt switch of that many sessions."""
    package_s: float = 0.01
    """Encoding of one chunk, beside all else."""
    weights: str = "virtual"
    """Digest of the weights: states go on only where it is equal."""
    load_s: float = 2.0
    """Until the worker can serve; infinite: it never can."""
    slots: int = 4
    """Sessions that fit on the device."""
    host_states: int = 8
    """Suspended sessions that fit in host memory."""
    host_bytes_per_s: float = 1e6
    """Between device and host."""
    state_bytes: int = 4_096
    """Of each state, beside what changes with every chunk. These bytes exist while a state is moved."""
    decode_batch: int = 1
    denoising: int = 4
    """Forwards of a chunk before its latents are clean; one more follows."""
    chunk_at_once: bool = False
    """Have a chunk's forwards be one event that takes as long, rather than an event each."""

    @property
    def config(self) -> ModelConfig:
        """A model whose states are a few bytes: chunks of 3 latent frames, a window of 3 chunks, no end."""
        kind = _ChunkAtOnce if self.chunk_at_once else ModelConfig
        return kind(
            dim=2,
            ffn_dim=1,
            num_heads=1,
            num_layers=1,
            text_dim=1,
            text_len=1,
            latent_height=1,
            latent_width=1,
            in_dim=1,
            out_dim=1,
            freq_dim=2,
            patch_size=(1, 1, 1),
            local_attn_size=9,
            rotation="window",
            denoising_steps=tuple(1000 - step for step in range(self.denoising)),
        )

    def stages(self) -> dict[str, dict[int, float]]:
        """For the engine, as a measured profile file has them."""
        scale = self.denoising + 1 if self.chunk_at_once else 1
        return {
            "text": dict(self.text_s),
            "recache": dict(self.recache_s),
            "forward": {size: scale * seconds for size, seconds in self.forward_s.items()},
            "decode": dict(self.decode_s),
            "package": {1: self.package_s},
        }

    def chunk_s(self) -> dict[int, float]:
        """L(b): seconds in which b sessions together get one chunk each, as a worker's warm-up measures."""
        forward, decode = LatencyProfile(self.forward_s), LatencyProfile(self.decode_s)
        sizes = sorted({1, *self.forward_s})
        return {
            size: (self.denoising + 1) * forward(size) + decode(1) for size in sizes if size <= self.slots
        }
