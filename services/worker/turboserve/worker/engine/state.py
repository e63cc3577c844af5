"""The complete state of one session on its worker, exactly what a migration transfers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.interface import SessionSpec
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import Slab
from turboserve.worker.model.config import ModelConfig

if TYPE_CHECKING:
    from pydantic import JsonValue


@dataclass(eq=False)
class SessionState:
    """State of one session between two chunks."""

    session: str
    slab: Slab
    ring: KVRing
    generator: torch.Generator
    seed: int
    prompt: str
    text: Tensor | None = None
    """Embedding of `prompt` under `values`, [L, text_dim], once the text stage has computed it."""
    values: Mapping[str, JsonValue] = field(default_factory=dict)
    """Values of the model's controls, by name."""
    fidelity: Fidelity | None = None
    """Configuration of the next chunk. None: the best."""
    fixed_fidelity: bool = False
    """Whether `fidelity` was set with the session or by a control, so that no policy changes it."""
    floor: float | None = None
    """See `SessionSpec.floor`."""
    pinned: bool = False
    """See `SessionSpec.pinned`."""
    control_seq: int = 0
    """Number of the last control applied."""
    next_chunk: int = 0
    recent: list[Tensor] = field(default_factory=list)
    """Clean latents of the newest chunks, [frames, C, H, W] each: at least the window, if generated."""
    decoder_cache: dict[str, Tensor] | None = None
    """The decoder's cache, opaque to the engine; None before the first latent frame."""

    @classmethod
    def begin(cls, spec: SessionSpec, slab: Slab, ring: KVRing, generator: torch.Generator) -> Self:
        """The state of a session that has generated nothing."""
        return cls(
            spec.session,
            slab,
            ring,
            generator,
            spec.seed,
            spec.prompt,
            fidelity=spec.fidelity,
            fixed_fidelity=spec.fidelity is not None,
            floor=spec.floor,
            pinned=spec.pinned,
        )

    def first_frame(self, config: ModelConfig) -> int:
        """Absolute index of the next chunk's first latent frame."""
        return self.next_chunk * config.frames_per_chunk

    def remember(self, latents: Tensor, config: ModelConfig) -> None:
        """Add a finished chunk's clean latents, and drop those that no window reaches any more."""
        self.recent.append(latents)
        chunks = -(-config.window_frames // config.frames_per_chunk)
        del self.recent[:-chunks]

    def forget(self) -> None:
        """Drop the tensors on the device beside the slab; the state is unusable afterwards."""
        self.text, self.decoder_cache = None, None
        self.recent.clear()

    def reseed(self, chunk: int) -> None:
        """Set the generator to the beginning of chunk `chunk`'s noise.

        The noise of a chunk depends only on the session's seed and the chunk's number. A session whose state
        was lost therefore continues with the same noise.
        """
        digest = hashlib.blake2b(f"{self.seed}:{chunk}".encode(), digest_size=8).digest()
        self.generator.manual_seed(int.from_bytes(digest, "big") >> 1)
