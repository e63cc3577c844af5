"""L(b) of every stage of the pipeline, for any model on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from turboserve.bench.engine.measure import Sessions, Timer
from turboserve.bench.engine.models import PROMPT, FixedText
from turboserve.worker.engine.engine import TEXT_BATCH, Models
from turboserve.worker.engine.profile_file import ProfileFile
from turboserve.worker.engine.snapshot import fingerprint
from turboserve.worker.engine.work import RecacheWork
from turboserve.worker.model.schedule import Schedule


def profile_stages(
    models: Models, largest: int, repeats: int, attention: str = "rows", compiler: str | None = None
) -> ProfileFile:
    """Median seconds by batch size: 1, 2, 4 … `largest`, as far as memory reaches.

    Of processor time on a CPU. Decoding and packaging go one session at a time, so 1 is their only size;
    recaches are gathered to no more tokens than a batch of chunks has. A stand-in for a text encoder is not
    measured: the worker learns that stage. `attention`, `compiler`: see `Sessions`.
    """
    model = models.transformer
    config, device = model.config, model.patch_embedding.weight.device
    timer = Timer(device)
    stages: dict[str, dict[int, float]] = {"recache": {}, "forward": {}}
    if not isinstance(models.text, FixedText):
        stages = {"text": _text(models, timer, largest, repeats)} | stages
    with torch.inference_mode():
        text = models.text.encode([PROMPT])
    latents = torch.zeros(config.latent_shape, device=device)
    for size in _sizes(largest):
        try:
            sessions = Sessions(model, size, text, attention=attention, compiler=compiler)
            stages["forward"][size] = sessions.measure(timer, repeats).forward_s
            latents = sessions.chunk()[0]
            if size == 1 or size * config.window_frames <= largest * config.frames_per_chunk:
                stages["recache"][size] = _recache(sessions, models, latents, timer, repeats)
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            break
    return ProfileFile(
        fingerprint(config), device.type, stages | _after_forwards(models, latents, timer, repeats)
    )


def _sizes(largest: int) -> list[int]:
    powers = {2**power for power in range(largest.bit_length())}
    return sorted(size for size in powers | {largest} if size <= largest)


def _text(models: Models, timer: Timer, largest: int, repeats: int) -> dict[int, float]:
    def encode(size: int) -> Callable[[], object]:
        return torch.inference_mode()(lambda: models.text.encode([PROMPT] * size))

    return {size: timer.median(encode(size), repeats) for size in _sizes(min(largest, TEXT_BATCH))}


def _recache(sessions: Sessions, models: Models, latents: Tensor, timer: Timer, repeats: int) -> float:
    config = models.transformer.config
    for state in sessions.states:
        chunks = min(state.next_chunk, config.window_frames // config.frames_per_chunk)
        state.recent = [latents] * chunks
    schedule = Schedule(config)
    rows = [RecacheWork(state, config, schedule).row() for state in sessions.states]
    return timer.median(lambda: sessions.forward(rows), repeats)


@torch.inference_mode()
def _after_forwards(
    models: Models, latents: Tensor, timer: Timer, repeats: int
) -> dict[str, dict[int, float]]:
    from turboserve.worker.media import FragmentEncoder

    frames, cache = models.decoder.decode(latents, None)
    decode_s = timer.median(lambda: models.decoder.decode(latents, cache), repeats)
    shown = models.decoder.decode(latents, cache)[0].cpu().numpy()
    encoder, fps = FragmentEncoder(), models.transformer.config.fps
    package_s = timer.median(
        lambda: encoder.encode(shown, index=1, first_frame=len(frames), fps=fps), repeats
    )
    return {"decode": {1: decode_s}, "package": {1: package_s}}
