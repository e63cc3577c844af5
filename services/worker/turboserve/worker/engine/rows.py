"""One forward over any rows: sessions at different steps, timesteps, frame indices, prompts and fill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from cachetools import LRUCache
from torch import Tensor

from turboserve.worker.engine.ring import KVRing, Placement
from turboserve.worker.model.block import AttentionMemory
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

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionMemory.attend`."""
        out = [
            row.ring.attend(layer, row.placement, *(x[i : i + 1] for x in (q, k, v)))
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
