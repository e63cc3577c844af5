"""Rebuild a lost session by clean passes over its remaining latents."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from turboserve.worker.engine.errors import InvalidRebuildError
from turboserve.worker.engine.session import Session, Starting
from turboserve.worker.engine.spec import Rebuild
from turboserve.worker.model.config import ModelConfig


def check_rebuild(rebuild: Rebuild, config: ModelConfig) -> None:
    """Check that the latents are those of some chunks before the next. Raises `InvalidRebuildError`."""
    frames, *shape = rebuild.latents.shape
    _, *needed = config.latent_shape
    per_chunk = config.frames_per_chunk
    if shape != needed or not frames or frames % per_chunk:
        found = tuple(rebuild.latents.shape)
        raise InvalidRebuildError(
            f"latents: shape {found}, need ({per_chunk}·n, {', '.join(map(str, needed))})"
        )
    if frames > rebuild.next_chunk * per_chunk:
        raise InvalidRebuildError(f"latents: {frames} frames before chunk {rebuild.next_chunk}")
    if rebuild.sink is not None and list(rebuild.sink.shape) != [config.sink_size, *needed]:
        raise InvalidRebuildError(f"sink: shape {tuple(rebuild.sink.shape)}, need {config.sink_size} frames")


def plan_rebuild(
    session: Session, next_chunk: int, parts: Sequence[Tensor], sink: Tensor | None, config: ModelConfig
) -> None:
    """Plan the session's first forwards: over its sink, if kept, then over its newest chunks.

    `parts`: clean latents of the chunks before `next_chunk`, the oldest first, [F, C, H, W] each.
    """
    state = session.state
    state.next_chunk = next_chunk
    first = state.first_frame(config) - len(parts) * config.frames_per_chunk
    replay = [(0, sink)] if sink is not None and first >= config.sink_size else []
    for part in parts:
        replay.append((first, part))
        state.remember(part, config)
        first += config.frames_per_chunk
    session.activity = Starting(tuple(replay))
