"""Declared behavior of a virtual device: latencies by batch size, memory, and granularity of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.model.config import ModelConfig


@dataclass(frozen=True)
class _ChunkAtOnce(ModelConfig):
    """A model whose chunk is one forward that takes as long as all of the chunk's forwards."""

    @property
    def chunk_forwards(self) -> int:
        return 1


@dataclass(frozen=True)
class DeviceProfile:
    """Latencies in seconds by batch size, interpolated linearly between the given sizes and beyond them."""

    forward_s: Mapping[int, float] = field(default_factory=lambda: {1: 0.03, 4: 0.06})
    """Time of one forward of that many sessions."""
    decode_s: Mapping[int, float] = field(default_factory=lambda: {1: 0.02})
    """Time to decode that many sessions' chunks, beside the forwards."""
    text_s: Mapping[int, float] = field(default_factory=lambda: {1: 0.01})
    """Time to encode that many prompts."""
    recache_s: Mapping[int, float] = field(default_factory=lambda: {1: 0.05})
    """Time of a prompt switch of that many sessions."""
    package_s: float = 0.01
    """Time to encode one chunk, beside all other work."""
    weights: str = "virtual"
    """Digest of the weights. A state continues only on a worker with the same digest."""
    load_s: float = 2.0
    """Time until the worker can serve; infinite if it never can."""
    slabs: int = 4
    """Sessions that fit on the device."""
    host_states: int = 8
    """Suspended sessions that fit in host memory."""
    host_bytes_per_s: float = 1e6
    """Pace of copies between device and host."""
    state_layers: int = 1
    """Layers of a state. A session that returns to a slab computes from the arrival of the first one on."""
    state_bytes: int = 4_096
    """Bytes of each state that chunks do not change. They exist while a state is transferred."""
    overlaps: bool = True
    """Whether decodes and copies of states run beside forwards. A worker on one core takes turns."""
    decode_batch: int = 1
    denoising: int = 4
    """Forwards of a chunk before its latents are clean; one more follows."""
    fps: int = 16
    """Video frames per second. A chunk has 12 frames."""
    chunks_of: Mapping[int, int] = field(default_factory=dict)
    """Seed of a session → number of its chunks, after which its video ends. Other sessions have no end."""
    forward_shares: Mapping[tuple[int, float], float] = field(default_factory=dict)
    """(Chunks of the window, sparsity) → time of a forward, relative to one at the best configuration. A
    configuration that is not given takes as long as the best."""
    ladder: FidelityLadder | None = None
    """Configurations that workers may choose. None: the best alone."""
    parallel_share: float | None = None
    """Time of a forward that two devices compute together, relative to one on its own. None: they cannot."""
    chunk_at_once: bool = False
    """Whether a chunk's forwards are one event of the same total time, rather than an event each."""

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
            fps=self.fps,
            denoising_steps=tuple(1000 - step for step in range(self.denoising)),
        )

    def share_of(self, fidelity: Fidelity | None) -> float:
        """Return the time of a forward at this configuration, relative to one at the best."""
        if fidelity is None:
            return 1.0
        return self.forward_shares.get((fidelity.window_chunks, fidelity.sparsity), 1.0)

    def stages(self) -> dict[str, dict[int, float]]:
        """Return the latencies for the engine, in the form of a measured profile file."""
        scale = self.denoising + 1 if self.chunk_at_once else 1
        return {
            "text": dict(self.text_s),
            "recache": dict(self.recache_s),
            "forward": {size: scale * seconds for size, seconds in self.forward_s.items()},
            "decode": dict(self.decode_s),
            "package": {1: self.package_s},
        }

    def chunk_s(self) -> dict[int, float]:
        """Return L(b): seconds in which b sessions get one chunk each, as a worker's warm-up measures."""
        forward, decode = LatencyProfile(self.forward_s), LatencyProfile(self.decode_s)
        sizes = sorted({1, *self.forward_s})
        return {
            size: (self.denoising + 1) * forward(size) + decode(1) for size in sizes if size <= self.slabs
        }
