"""Forwards that compute a session's keys and values again: recache and replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.work import Row
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.schedule import Schedule


class RecacheWork:
    """One forward over the newest clean latents under a new prompt (LongLive 1, KV recache).

    It rewrites the rolling frames' keys and values at their ring positions. The sink keeps those of the old
    prompt, unless the pass begins at the session's first frame: then it rewrites the sink too, as the
    reference does.
    """

    def __init__(self, state: SessionState, config: ModelConfig, schedule: Schedule) -> None:
        """Prepare the forward. The new prompt must already be in the slab."""
        end = state.first_frame(config)
        latents = torch.cat(state.recent)[-config.window_frames :]
        self._frames = latents.shape[0]
        self.done = 0
        self.total = 1
        first = end - self._frames
        placement = state.ring.resident(first, self._frames, keep_sink=first > 0)
        self._row = Row(state.ring, placement, latents, schedule.context_timestep, first)

    @property
    def frames(self) -> int:
        """See `Work.frames`."""
        return self._frames

    def row(self) -> Row:
        """See `Work.row`."""
        return self._row

    def advance(self, flow: Tensor) -> None:
        """See `Work.advance`."""
        self.done += 1


@dataclass(frozen=True, eq=False)
class ReplayPart:
    """One clean pass over kept latents."""

    first: int
    """Absolute index of the first latent frame."""
    latents: Tensor
    """[F, C, H, W]"""
    fidelity: Fidelity | None = None
    """Configuration of the chunk, whose clean pass read as much. None: the best."""


class ReplayWork:
    """Clean passes over kept latents, chunk by chunk, into an empty ring.

    For a session no longer than its window, this restores the lost keys and values. For a longer one, it
    gives the keys and values of a session that began with the kept latents. Where the sink is longer than a
    chunk, its later frames get clean keys and values instead of those of their chunk's first forward.
    """

    def __init__(
        self,
        state: SessionState,
        config: ModelConfig,
        schedule: Schedule,
        parts: Sequence[ReplayPart],
    ) -> None:
        """`parts`: the passes, in order."""
        self.done = 0
        self._per_chunk = config.frames_per_chunk
        self.total = len(parts)
        self._ring = state.ring
        self._parts = parts
        self._timestep = schedule.context_timestep

    @property
    def frames(self) -> int:
        """See `Work.frames`."""
        return self._parts[min(self.done, self.total - 1)].latents.shape[0]

    def row(self) -> Row:
        """See `Work.row`."""
        part = self._parts[self.done]
        placement = self._ring.place(part.first, self.frames)
        if part.fidelity is not None:
            placement = self._ring.reduced(placement, part.fidelity, self._per_chunk)
        return Row(self._ring, placement, part.latents, self._timestep, part.first)

    def advance(self, flow: Tensor) -> None:
        """See `Work.advance`."""
        self.done += 1
