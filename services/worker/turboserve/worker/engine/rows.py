"""One forward over any set of rows: sessions at their own steps, timesteps, frame indices, prompts and
fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turboserve.worker.engine.ring import KVRing, Placement
from turboserve.worker.model.transformer import CausalWanTransformer


@dataclass(frozen=True, eq=False)
class Row:
    """One session's part of a forward. Every forward of an engine is made of these and nothing else."""

    ring: KVRing
    placement: Placement
    latents: Tensor
    """[F, C, H, W]"""
    timestep: float
    first_frame: int
    """Absolute index of the row's first latent frame."""


class RowsMemory:
    """The transformer's memory for a batch of rows: each attends to its own ring, in place."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Memory.attend`."""
        out = [row.ring.attend(layer, row.placement, q[i], k[i], v[i]) for i, row in enumerate(self._rows)]
        return out[0] if len(out) == 1 else torch.cat(out)

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        """See `Memory.attend_text`."""
        out = [row.ring.attend_text(layer, q[i]) for i, row in enumerate(self._rows)]
        return out[0] if len(out) == 1 else torch.cat(out)


@torch.inference_mode()
def forward_rows(model: CausalWanTransformer, rows: Sequence[Row]) -> Tensor:
    """Run the transformer once over rows with equally many frames; returns their flows [B, F, C, H, W].

    Keys and values are written to the rows' rings as a side effect, which repeating the call repeats exactly.
    """
    parameter = model.patch_embedding.weight
    frames = rows[0].latents.shape[0]
    latents = torch.stack([row.latents for row in rows]).to(parameter.dtype)
    timesteps = torch.tensor([row.timestep for row in rows], dtype=torch.float64)
    first = torch.tensor([row.first_frame for row in rows])
    index = first.unsqueeze(1) + torch.arange(frames)
    flow: Tensor = model(
        latents,
        timesteps.unsqueeze(1).expand(-1, frames).to(parameter.device, non_blocking=True),
        index.to(parameter.device, non_blocking=True),
        RowsMemory(rows),
    )
    return flow
