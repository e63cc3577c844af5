"""The next forwards of a session, and how one forward computes the rows of any sessions at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from cachetools import LRUCache
from torch import Tensor

from turboserve.worker.engine.fidelity import step_indices
from turboserve.worker.engine.kv_ring import Attention, KVRing, attention
from turboserve.worker.engine.ring_placement import Placement
from turboserve.worker.engine.state import SessionState
from turboserve.worker.model.block import AttentionMemory
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.schedule import Schedule, add_noise, to_clean
from turboserve.worker.model.transformer import CausalWanTransformer, Conditioning

ROTATIONS = 64
"""Number of rotations kept: one per active session, because a chunk's forwards share one."""


@dataclass(frozen=True, eq=False)
class Row:
    """One session's part of a forward."""

    ring: KVRing
    placement: Placement
    latents: Tensor
    """[F, C, H, W]"""
    timestep: float
    first_frame: int
    """Absolute index of the row's first latent frame."""


class RowsMemory:
    """The transformer's memory for a batch of rows: each row attends to its own ring, in place."""

    def __init__(self, rows: Sequence[Row], by: Attention = attention) -> None:
        """`by` computes self-attention. Attention over the prompt, which has few keys, is always exact."""
        self._rows, self._by = rows, by

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionMemory.attend`."""
        out = [
            row.ring.attend(layer, row.placement, *(x[i : i + 1] for x in (q, k, v)), by=self._by)
            for i, row in enumerate(self._rows)
        ]
        return out[0] if len(out) == 1 else torch.cat(out)

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        """See `AttentionMemory.attend_text`."""
        out = [row.ring.attend_text(layer, q[i : i + 1]) for i, row in enumerate(self._rows)]
        return out[0] if len(out) == 1 else torch.cat(out)


class RowsForward:
    """Runs one model over rows. Caches what depends only on the timestep or on the chunk's frames.

    Create it after the model is on its device: it changes the layout of the model's projections (`fuse`).
    """

    def __init__(
        self,
        model: CausalWanTransformer,
        memory: Callable[[Sequence[Row]], AttentionMemory] = RowsMemory,
        compiler: str | None = None,
    ) -> None:
        """`memory`: how the rows attend. `compiler`: a backend of `torch.compile`; None: none."""
        model.fuse()
        model.compile_blocks(compiler)
        self._compiled = compiler is not None
        self._memory = memory
        self._model = model
        self._weight = model.patch_embedding.weight
        model.rotation.prepare(self._weight.device)
        self._conditions: dict[float, Conditioning] = {}
        self._rotations: LRUCache[tuple[int, int], Tensor] = LRUCache(ROTATIONS)

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row]) -> Tensor:
        """Run the transformer once over rows with equally many frames; returns their flows [B, F, C, H, W].

        As a side effect, writes keys and values to the rows' rings; repeating the call repeats that exactly.
        """
        frames = rows[0].latents.shape[0]
        latents = torch.stack([row.latents for row in rows]).to(self._weight.dtype)
        rotations = [self._rotation(row.first_frame, frames) for row in rows]
        rotation = rotations[0] if len(rows) == 1 else torch.cat(rotations)
        return self._model.run(latents, self._conditioning(rows), rotation, self._memory(rows))

    @torch.inference_mode()
    def tokens(self, row: Row, tokens: slice, memory: AttentionMemory) -> Tensor:
        """Run the transformer over some tokens of each of one row's frames.

        Returns their patch channels [1, F, T', ·]. `memory` gets these tokens' queries, keys and values.
        """
        frames = row.latents.shape[0]
        latents = row.latents.unsqueeze(0).to(self._weight.dtype)
        rotation = self._rotation(row.first_frame, frames).unflatten(1, (frames, -1))
        return self._model.run_tokens(
            self._model.patchify(latents)[:, :, tokens].contiguous(),
            self._conditioning([row]),
            rotation[:, :, tokens].flatten(1, 2),
            memory,
        )

    def flow(self, channels: Tensor) -> Tensor:
        """Patch channels of all tokens [1, F, T, ·] → the row's flow [F, C, H, W]."""
        return self._model.unpatchify(channels)[0]

    def _conditioning(self, rows: Sequence[Row]) -> Conditioning:
        each = [self._condition(row.timestep) for row in rows]
        if len(each) == 1 or (not self._compiled and all(one is each[0] for one in each)):
            # The compiler compiles once per form of the input: keep the number of forms small.
            return each[0]
        return Conditioning(
            torch.cat([one.blocks for one in each], dim=2), torch.cat([one.head for one in each], dim=1)
        )

    def _condition(self, timestep: float) -> Conditioning:
        if timestep not in self._conditions:
            # A model uses only a few timesteps, so that this dictionary stays small.
            of = torch.full((1, 1), timestep, dtype=torch.float64, device=self._weight.device)
            self._conditions[timestep] = self._model.condition(of)
        return self._conditions[timestep]

    def _rotation(self, first: int, frames: int) -> Tensor:
        key = (first, frames)
        if key not in self._rotations:
            index = torch.arange(first, first + frames, device=self._weight.device).unsqueeze(0)
            rotation = self._model.rotation.at(index)
            self._rotations[key] = torch.view_as_real(rotation) if self._compiled else rotation
        return self._rotations[key]


Noise = Callable[[int], Tensor]
"""Returns the noise before denoising step i, float32 [F, C, H, W]."""


class Work(Protocol):
    """A sequence of forwards of one session."""

    done: int
    """Number of forwards done."""
    total: int
    """Number of all forwards."""

    @property
    def frames(self) -> int:
        """Latent frames of the next forward."""
        ...

    def row(self) -> Row:
        """The next forward; repeating the call gives the same."""
        ...

    def advance(self, flow: Tensor) -> None:
        """Accept the forward's result, [F, C, H, W]."""
        ...


class ChunkWork:
    """Denoising forwards of one chunk, then the clean pass that writes its final keys and values."""

    def __init__(
        self,
        state: SessionState,
        config: ModelConfig,
        schedule: Schedule,
        noise: Noise | None = None,
        given: Tensor | None = None,
    ) -> None:
        """Take the chunk's ring positions, evicting frames. `noise` defaults to the session's generator.

        `given`: the clean latents that the chunk is to have, float32 [F, C, H, W]. None: it is denoised.
        """
        self.index = state.next_chunk
        self.done = 0
        self._steps, self._sigmas = schedule.steps, schedule.step_sigmas
        reduced = state.fidelity
        if reduced is not None:
            taken = step_indices(reduced.steps, len(schedule.steps))
            self._steps = tuple(schedule.steps[i] for i in taken)
            self._sigmas = tuple(schedule.step_sigmas[i] for i in taken)
        if given is not None:
            # One forward whose result is not used, then the clean pass.
            self._steps = (schedule.context_timestep,)
        self.denoising = len(self._steps)
        """Number of forwards after which the latents are clean."""
        self.total = self.denoising + 1
        self.clean: Tensor | None = None
        """The chunk's clean latents, float32 [F, C, H, W], once the denoising forwards are done."""
        self._schedule = schedule
        self._ring = state.ring
        self._first = state.first_frame(config)

        def read(whole: Placement) -> Placement:
            return whole if reduced is None else self._ring.reduced(whole, reduced, config.frames_per_chunk)

        # One placement for all forwards where possible: the ring keeps the views of the newest.
        self._placement = self._later = read(self._ring.place(self._first, config.frames_per_chunk))
        if 0 < self._first < config.sink_size:
            # LongLive 1 writes to its sink only in a chunk's first forward, after the session's first chunk.
            self._later = read(self._ring.resident(self._first, config.frames_per_chunk, keep_sink=True))
        self._frames = config.frames_per_chunk
        self._noise = noise or self._drawn(state, config)
        self._given = given
        self._noisy = self._noise(0) if given is None else given

    @property
    def frames(self) -> int:
        """See `Work.frames`."""
        return self._frames

    def row(self) -> Row:
        """See `Work.row`."""
        if self.clean is None:
            return self._row(self._noisy, self._steps[self.done])
        return self._row(self.clean, self._schedule.context_timestep)

    def advance(self, flow: Tensor) -> None:
        """See `Work.advance`. The flow that the clean pass predicts is not used."""
        if self.clean is None and self._given is not None:
            self.clean = self._given
        elif self.clean is None:
            sigmas = self._sigmas
            estimate = to_clean(self._noisy, flow, sigmas[self.done])
            if self.done + 1 < len(sigmas):
                self._noisy = add_noise(estimate, self._noise(self.done + 1), sigmas[self.done + 1])
            else:
                self.clean = estimate
        self.done += 1

    def _row(self, latents: Tensor, timestep: float) -> Row:
        placement = self._later if self.done else self._placement
        return Row(self._ring, placement, latents, timestep, self._first)

    @staticmethod
    def _drawn(state: SessionState, config: ModelConfig) -> Noise:
        state.reseed(state.next_chunk)
        device = state.slab.keys.device

        def draw(step: int) -> Tensor:
            return torch.randn(config.latent_shape, generator=state.generator, device=device)

        return draw
