"""L(b) of every stage of the pipeline, for any model on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from turboserve.bench.engine.measure import Sessions, Timer
from turboserve.bench.engine.models import PROMPT, FixedText
from turboserve.worker.engine.context_forwards import RecacheWork
from turboserve.worker.engine.interface import Decoder
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.pipeline import TEXT_BATCH
from turboserve.worker.engine.profile_file import ProfileFile
from turboserve.worker.engine.snapshot import fingerprint
from turboserve.worker.model.schedule import Schedule


def profile_stages(
    models: Models, largest: int, repeats: int, attention: str = "rows", compiler: str | None = None
) -> ProfileFile:
    """Measure the median seconds by batch size: 1, 2, 4 … `largest`, as far as memory reaches.

    Seconds are processor time on a CPU. Packaging handles one session at a time, so 1 is its only size.
    Recaches are gathered to no more tokens than a batch of chunks has. A stand-in for a text encoder is not
    measured: the worker learns that stage. For `attention` and `compiler`, see `Sessions`.
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
    stages["decode"] = decoding(models.decoder, latents, _sizes(largest), timer, repeats)
    stages["package"] = {1: _package(models, latents, timer, repeats)}
    return ProfileFile(fingerprint(config), device.type, stages)


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
def decoding(
    decoder: Decoder, latents: Tensor, sizes: Sequence[int], timer: Timer, repeats: int
) -> dict[int, float]:
    """Measure the median seconds to decode one chunk of several sessions, by their number.

    Latents are [F, C, h, w] per session. The sizes end where memory ends.
    """
    seconds: dict[int, float] = {}
    for size in sizes:
        try:
            rows = latents.expand(size, *latents.shape)
            caches = decoder.decode(rows, None)[1]
            seconds[size] = timer.median(partial(decoder.decode, rows, caches), repeats)
        except torch.OutOfMemoryError:
            if not seconds:
                raise
            break
    return seconds


@torch.inference_mode()
def _package(models: Models, latents: Tensor, timer: Timer, repeats: int) -> float:
    from turboserve.worker.media import FragmentEncoder

    first, caches = models.decoder.decode(latents.unsqueeze(0), None)
    shown = models.decoder.decode(latents.unsqueeze(0), caches)[0][0].cpu().numpy()
    encoder, fps = FragmentEncoder(), models.transformer.config.fps
    return timer.median(lambda: encoder.encode(shown, index=1, first_frame=first.shape[1], fps=fps), repeats)
