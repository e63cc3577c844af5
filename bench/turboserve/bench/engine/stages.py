"""L(b) of every stage of the pipeline with the shipped model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from turboserve.bench.engine.measure import Sessions, Timer
from turboserve.bench.engine.models import PROMPT, toyworld
from turboserve.worker.engine.profile_file import ProfileFile
from turboserve.worker.engine.rows import RowsForward
from turboserve.worker.engine.snapshot import fingerprint
from turboserve.worker.engine.work import RecacheWork
from turboserve.worker.media import FragmentEncoder
from turboserve.worker.model.schedule import Schedule


def profile_toyworld(largest: int, repeats: int) -> ProfileFile:
    """Median seconds of processor time by batch size: 1, 2, 4 … `largest`.

    Decoding and packaging go one session at a time, so 1 is their only size.
    """
    sizes = sorted({*(2**power for power in range(largest.bit_length())), largest})
    sizes = [size for size in sizes if size <= largest]
    models = toyworld()
    config, timer = models.transformer.config, Timer(torch.device("cpu"))
    with torch.inference_mode():
        text = models.text.encode([PROMPT])
    stages: dict[str, dict[int, float]] = {"text": {}, "recache": {}, "forward": {}}

    def encode(size: int) -> Callable[[], object]:
        return torch.inference_mode()(lambda: models.text.encode([PROMPT] * size))

    latents = torch.zeros(config.latent_shape)
    for size in sizes:
        stages["text"][size] = timer.median(encode(size), repeats)
        sessions = Sessions(models.transformer, size, text)
        stages["forward"][size] = sessions.measure(timer, repeats).forward_s
        latents = sessions.chunk()[0]
        for state in sessions.states:
            chunks = min(state.next_chunk, config.window_frames // config.frames_per_chunk)
            state.recent = [latents] * chunks
        forward, schedule = RowsForward(models.transformer), Schedule(config)
        rows = [RecacheWork(state, config, schedule).row() for state in sessions.states]
        stages["recache"][size] = timer.median(lambda rows=rows, run=forward: run(rows), repeats)  # type: ignore[misc]
    _, cache = models.decoder.decode(latents, None)
    stages["decode"] = {1: timer.median(lambda: models.decoder.decode(latents, cache), repeats)}
    frames = models.decoder.decode(latents, cache)[0].numpy()
    encoder = FragmentEncoder()
    stages["package"] = {
        1: timer.median(lambda: encoder.encode(frames, index=1, first_frame=9, fps=config.fps), repeats)
    }
    return ProfileFile(fingerprint(config), "cpu", stages)
