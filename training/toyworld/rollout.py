"""A plain sampler over an explicit list of keys and values, to observe training: many sessions in step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from memory import CHUNK, turn
from torch import Tensor
from torch.nn import functional as F

from turboserve.worker.model.schedule import Schedule, add_noise, to_clean
from turboserve.worker.model.toy_text import ToyText
from turboserve.worker.model.transformer import CausalWanTransformer

Pairs = list[tuple[Tensor, Tensor]]


@dataclass
class Sessions:
    """Sessions that are all at the same chunk."""

    text: Pairs
    generator: torch.Generator
    chunk: int = 0
    sink: Pairs = field(default_factory=list)
    before: Pairs = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)


class _Memory:
    def __init__(
        self, model: CausalWanTransformer, text: Pairs, sink: Pairs, before: Pairs, shift: int
    ) -> None:
        self._text, self._sink, self._before = text, sink, before
        self._shift, self._config = torch.tensor(shift), model.config
        self.written: Pairs = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.written.append((k, v))
        keys, values = [k], [v]
        if self._before:
            keys.append(self._before[layer][0])
            values.append(self._before[layer][1])
        if self._sink:
            keys.append(turn(self._sink[layer][0], self._shift, self._config))
            values.append(self._sink[layer][1])
        return _attention(q, torch.cat(keys, 1), torch.cat(values, 1))

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        return _attention(q, *self._text[layer])


class Sampler:
    """Generates chunks with the model's own steps.

    With `window`, the sink is read just before the rolling frames.
    """

    def __init__(self, model: CausalWanTransformer, text: ToyText, window: bool = True) -> None:
        self._model, self._text, self._window = model, text, window
        self._schedule = Schedule(model.config)

    @torch.no_grad()
    def open(self, prompts: Sequence[str], seed: int) -> Sessions:
        return Sessions(self._project(prompts), torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def switch(self, sessions: Sessions, prompts: Sequence[str]) -> None:
        """Recache under new prompts, as the engine does: one forward over the window's chunks.

        The sink keeps the old prompts, unless the window still begins with it.
        """
        sessions.text = self._project(prompts)
        if not sessions.chunk:
            return
        first = 0 if sessions.chunk <= 3 else sessions.chunk - 2
        sessions.before = []
        if not first:
            sessions.sink = []
        _, written = self._forward(sessions, torch.cat(sessions.latents[first:], 1), 0.0, first)
        tokens = CHUNK * self._model.config.tokens_per_frame
        if not first:
            sessions.sink = [(k[:, :tokens], v[:, :tokens]) for k, v in written]
        if sessions.chunk > 1:
            sessions.before = [(k[:, -tokens:], v[:, -tokens:]) for k, v in written]

    @torch.no_grad()
    def step(self, sessions: Sessions) -> Tensor:
        """Generate one chunk of latents [B, 3, 16, 8, 8]."""
        config, schedule = self._model.config, self._schedule
        batch = len(sessions.text[0][0])
        shape = (batch, CHUNK, config.in_dim, config.latent_height, config.latent_width)
        x = torch.randn(shape, generator=sessions.generator)
        clean = x
        for i, (timestep, sigma) in enumerate(zip(schedule.steps, schedule.step_sigmas, strict=True)):
            if i:
                x = add_noise(clean, torch.randn(shape, generator=sessions.generator), sigma)
            flow, _ = self._forward(sessions, x, timestep, sessions.chunk)
            clean = to_clean(x, flow, sigma)
        _, written = self._forward(sessions, clean, 0.0, sessions.chunk)
        if sessions.chunk == 0:
            sessions.sink = written
        else:
            sessions.before = written
        sessions.chunk += 1
        sessions.latents.append(clean)
        return clean

    def _forward(self, sessions: Sessions, x: Tensor, timestep: float, chunk: int) -> tuple[Tensor, Pairs]:
        newest = chunk + x.shape[1] // CHUNK - 1
        shift = CHUNK * max(0, newest - 2) if self._window else 0
        memory = _Memory(self._model, sessions.text, sessions.sink, sessions.before, shift)
        times = torch.full(x.shape[:2], timestep)
        index = torch.arange(CHUNK * chunk, CHUNK * chunk + x.shape[1]).expand(len(x), -1)
        return self._model(x, times, index, memory), memory.written

    def _project(self, prompts: Sequence[str]) -> Pairs:
        return self._model.project_text(self._text.encode(prompts).clone())


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
