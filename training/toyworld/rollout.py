"""A plain sampler over an explicit list of keys and values, to observe training: many sessions in step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from memory import turn
from torch import Tensor
from torch.nn import functional as F

from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.schedule import Schedule, add_noise, to_clean
from turboserve.worker.model.transformer import CausalWanTransformer

Pairs = list[tuple[Tensor, Tensor]]


@dataclass
class Sessions:
    """Sessions that are all at the same chunk."""

    text: Pairs
    generator: torch.Generator
    chunk: int = 0
    sink: Pairs = field(default_factory=list)
    rolling: list[Pairs] = field(default_factory=list)
    """Keys and values of the chunks that the window holds beside the sink, oldest first."""
    latents: list[Tensor] = field(default_factory=list)


class _Memory:
    """`Memory` over lists; `skipped` of the forward's tokens are not in the window."""

    def __init__(
        self, config: ModelConfig, text: Pairs, sink: Pairs, rolling: list[Pairs], shift: int, skipped: int
    ) -> None:
        self._config, self._text, self._sink, self._rolling = config, text, sink, rolling
        self._shift, self._skipped = shift, skipped
        self.written: Pairs = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.written.append((k, v))
        parts = [chunk[layer] for chunk in self._rolling]
        if self._sink:
            keys, values = self._sink[layer]
            shift = torch.tensor(self._shift, device=keys.device)
            parts.append((turn(keys, shift, self._config), values))
        parts.append((k[:, self._skipped :], v[:, self._skipped :]))
        return _attention(q, torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1))

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        return _attention(q, *self._text[layer])


class Sampler:
    """Generates chunks as the engine does, for a sink of exactly one chunk and window rotation."""

    def __init__(self, model: CausalWanTransformer, config: ModelConfig) -> None:
        self._model, self._config = model, config
        self._chunk = config.frames_per_chunk
        if config.sink_size != self._chunk:
            raise ValueError(f"sink_size: {config.sink_size} must be frames_per_chunk ({self._chunk})")
        self._window = config.window_frames // self._chunk
        self._schedule = Schedule(config)

    @torch.no_grad()
    def open(self, text: Tensor, seed: int) -> Sessions:
        """Begin sessions with embeddings [B, 8, dim]."""
        return Sessions(self._model.project_text(text), torch.Generator(text.device).manual_seed(seed))

    @torch.no_grad()
    def switch(self, sessions: Sessions, text: Tensor) -> None:
        """Recache under new embeddings: one forward over the window's newest latents.

        The sink keeps the old ones, unless the window still begins with it.
        """
        sessions.text = self._model.project_text(text)
        if not sessions.chunk:
            return
        first = max(0, sessions.chunk - self._window)
        kept = min(sessions.chunk - first, self._window - (1 if first else 0))
        latents = torch.cat(sessions.latents[first:], 1)
        skipped = sessions.chunk - first - kept
        sink = sessions.sink if first else []
        written = self._forward(sessions, latents, 0.0, first, sink, [], skipped)[1]
        tokens = self._chunk * self._config.tokens_per_frame
        chunks = [
            [(k[:, start : start + tokens], v[:, start : start + tokens]) for k, v in written]
            for start in range(skipped * tokens, latents.shape[1] // self._chunk * tokens, tokens)
        ]
        if not first:
            sessions.sink = chunks.pop(0)
        sessions.rolling = chunks

    @torch.no_grad()
    def step(self, sessions: Sessions) -> Tensor:
        """Generate one chunk of latents [B, frames_per_chunk, 16, 8, 8]."""
        config, schedule = self._config, self._schedule
        shape = (len(sessions.text[0][0]), *config.latent_shape)

        def noise() -> Tensor:
            device = sessions.generator.device
            return torch.randn(shape, generator=sessions.generator, device=device)

        x = clean = noise()
        for i, (timestep, sigma) in enumerate(zip(schedule.steps, schedule.step_sigmas, strict=True)):
            if i:
                x = add_noise(clean, noise(), sigma)
            clean = to_clean(x, self.flow(sessions, x, timestep), sigma)
        self.write(sessions, clean)
        return clean

    @torch.no_grad()
    def flow(self, sessions: Sessions, x: Tensor, timestep: float) -> Tensor:
        """Predict the flow of the next chunk's noisy latents."""
        return self._next(sessions, x, timestep)[0]

    @torch.no_grad()
    def write(self, sessions: Sessions, clean: Tensor) -> None:
        """Add a chunk of clean latents to the sessions."""
        written = self._next(sessions, clean, 0.0)[1]
        if sessions.chunk == 0:
            sessions.sink = written
        else:
            self._evict(sessions)
            sessions.rolling.append(written)
        sessions.chunk += 1
        sessions.latents.append(clean)

    def _next(self, sessions: Sessions, x: Tensor, timestep: float) -> tuple[Tensor, Pairs]:
        self._evict(sessions)
        return self._forward(sessions, x, timestep, sessions.chunk, sessions.sink, sessions.rolling, 0)

    def _evict(self, sessions: Sessions) -> None:
        """Drop chunks that the next one replaces: the window holds the sink, others and the chunk itself."""
        del sessions.rolling[: max(0, len(sessions.rolling) - (self._window - 2))]

    def _forward(
        self,
        sessions: Sessions,
        x: Tensor,
        timestep: float,
        chunk: int,
        sink: Pairs,
        rolling: list[Pairs],
        skipped: int,
    ) -> tuple[Tensor, Pairs]:
        first = chunk * self._chunk
        shift = max(0, first + x.shape[1] - self._config.window_frames)
        tokens = skipped * self._chunk * self._config.tokens_per_frame
        memory = _Memory(self._config, sessions.text, sink, rolling, shift, tokens)
        times = torch.full(x.shape[:2], timestep, device=x.device)
        index = torch.arange(first, first + x.shape[1], device=x.device).expand(len(x), -1)
        return self._model(x, times, index, memory), memory.written


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
