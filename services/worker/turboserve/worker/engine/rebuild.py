"""Checks and plans the rebuild of a session from the latents of a lost one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from turboserve.wording import counted
from turboserve.worker.engine.activity import Starting
from turboserve.worker.engine.context_forwards import ReplayPart
from turboserve.worker.engine.errors import InvalidRebuildError
from turboserve.worker.engine.interface import Rebuild
from turboserve.worker.engine.session import Session
from turboserve.worker.model.config import ModelConfig


def check_rebuild(rebuild: Rebuild, config: ModelConfig) -> None:
    """Check that the latents are those of some chunks before the next.

    Raises `InvalidRebuildError` or `InvalidFidelityError`.
    """
    frames, *shape = rebuild.latents.shape
    _, *needed = config.latent_shape
    per_chunk = config.frames_per_chunk
    if shape != needed or not frames or frames % per_chunk:
        found = tuple(rebuild.latents.shape)
        raise InvalidRebuildError(
            f"latents: shape {found}, need ({per_chunk}·n, {', '.join(map(str, needed))})"
        )
    if frames > rebuild.next_chunk * per_chunk:
        raise InvalidRebuildError(f"latents: {counted(frames, 'frame')} before chunk {rebuild.next_chunk}")
    chunks = frames // per_chunk
    if len(rebuild.fidelities) not in (0, chunks):
        raise InvalidRebuildError(
            f"fidelities: {len(rebuild.fidelities)} given for {counted(chunks, 'chunk')}"
        )
    for each in rebuild.fidelities:
        if each is not None:
            each.check(config)
    if rebuild.sink_fidelity is not None:
        rebuild.sink_fidelity.check(config)
    if rebuild.sink is not None and list(rebuild.sink.shape) != [config.sink_size, *needed]:
        frames_needed = counted(config.sink_size, "frame")
        raise InvalidRebuildError(f"sink: shape {tuple(rebuild.sink.shape)}, need {frames_needed}")


def plan_rebuild(
    session: Session, rebuild: Rebuild, parts: Sequence[Tensor], sink: Tensor | None, config: ModelConfig
) -> None:
    """Plan the session's first forwards: over its sink, if kept, then over its newest chunks.

    `parts`: clean latents of the chunks before `rebuild.next_chunk`, the oldest first, [F, C, H, W] each.
    """
    state = session.state
    state.next_chunk = rebuild.next_chunk
    fidelities = rebuild.fidelities or (None,) * len(parts)
    if not state.fixed_fidelity:
        state.fidelity = fidelities[-1]
    first = state.first_frame(config) - len(parts) * config.frames_per_chunk
    replay = []
    if sink is not None and first >= config.sink_size:
        replay.append(ReplayPart(0, sink, rebuild.sink_fidelity))
    for part, fidelity in zip(parts, fidelities, strict=True):
        replay.append(ReplayPart(first, part, fidelity))
        state.remember(part, config)
        first += config.frames_per_chunk
    session.activity = Starting(tuple(replay))
