"""The baseline: one session with the cache of a public runtime (Self-Forcing 33593df, LongLive 1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.schedule import Schedule, add_noise, to_clean
from turboserve.worker.model.transformer import CausalWanTransformer


class ShiftedCache:
    """Keys and values in order of time, as in Self-Forcing.

    An overflow shifts all of them left, in every layer. The ends are tensors that the host reads in every
    layer.
    """

    def __init__(self, model: CausalWanTransformer, text: Tensor) -> None:
        """`text` is the prompt embeddings [1, L, text_dim]."""
        config, weight = model.config, model.patch_embedding.weight
        self._sink = config.sink_size * config.tokens_per_frame
        self._size = config.window_frames * config.tokens_per_frame
        shape = (1, self._size, config.num_heads, config.head_dim)
        layers = range(config.num_layers)

        def number() -> Tensor:
            return torch.zeros(1, dtype=torch.long, device=weight.device)

        self._keys = [torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in layers]
        self._values = [torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in layers]
        self._ends = [(number(), number()) for _ in layers]
        """Per layer: tokens seen in all, tokens in the cache."""
        self._text = model.project_text(text)
        self.start = 0
        """Index of the forward's first token in its session."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Memory.attend`."""
        keys, values = self._keys[layer], self._values[layer]
        after = self._insert(layer, keys, values, k, v)
        self._move_ends(layer, k, after)
        return _attention(q, keys[:, :after], values[:, :after])

    def _insert(self, layer: int, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> int:
        """Write this forward's keys and values, and shift if they do not fit. Returns their end."""
        seen, held = self._ends[layer]
        count = k.shape[1]
        end = self.start + count
        if end > seen.item() and count + held.item() > self._size:
            evicted = int(count + held.item() - self._size)
            kept = int(held.item() - evicted - self._sink)
            for cache in (keys, values):
                cache[:, self._sink : self._sink + kept] = cache[
                    :, self._sink + evicted : self._sink + evicted + kept
                ].clone()
            after = int(held.item() + end - seen.item() - evicted)
        else:
            after = int(held.item() + end - seen.item())
        keys[:, after - count : after] = k
        values[:, after - count : after] = v
        return after

    def _move_ends(self, layer: int, k: Tensor, after: int) -> None:
        seen, held = self._ends[layer]
        seen.fill_(self.start + k.shape[1])
        held.fill_(after)

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        """See `Memory.attend_text`."""
        return _attention(q, *self._text[layer])


class ClonedCache(ShiftedCache):
    """The cache of LongLive 1.

    Every forward of every layer clones the whole cache, works on the clone, joins sink and window for
    attention, and then repeats the work on the cache itself.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Memory.attend`."""
        keys, values = self._keys[layer], self._values[layer]
        clones = keys.clone(), values.clone()
        after = self._insert(layer, *clones, k, v)
        joined = [torch.cat([c[:, : self._sink], c[:, self._sink : after]], dim=1) for c in clones]
        out = _attention(q, *joined)
        self._insert(layer, keys, values, k, v)
        self._move_ends(layer, k, after)
        return out


class NaiveLoop:
    """Makes chunk after chunk of one session."""

    def __init__(
        self, model: CausalWanTransformer, text: Tensor, cache: type[ShiftedCache] = ShiftedCache
    ) -> None:
        """`text` is the prompt embeddings [1, L, text_dim]; `cache` selects the public runtime."""
        # The references run without a compiler.
        model.compile_blocks(None)
        self._model = model
        self._schedule = Schedule(model.config)
        with torch.inference_mode():
            self._cache = cache(model, text)
        self._frame = 0

    @torch.inference_mode()
    def chunk(self, noise: Tensor) -> Tensor:
        """Make a chunk: noise [steps, F, C, H, W] → clean latents [F, C, H, W]."""
        schedule = self._schedule
        noisy, clean = noise[0], noise[0]
        for step, (timestep, sigma) in enumerate(zip(schedule.steps, schedule.step_sigmas, strict=True)):
            clean = to_clean(noisy, self._forward(noisy, timestep), sigma)
            if step + 1 < len(schedule.steps):
                noisy = add_noise(clean, noise[step + 1], schedule.step_sigmas[step + 1])
        self._forward(clean, schedule.context_timestep)
        self._frame += clean.shape[0]
        return clean

    def _forward(self, latents: Tensor, timestep: float) -> Tensor:
        config: ModelConfig = self._model.config
        weight = self._model.patch_embedding.weight
        frames = latents.shape[0]
        self._cache.start = self._frame * config.tokens_per_frame
        timesteps = torch.full((1, frames), timestep, dtype=torch.float64, device=weight.device)
        index = torch.arange(self._frame, self._frame + frames, device=weight.device).unsqueeze(0)
        flow: Tensor = self._model(latents.unsqueeze(0).to(weight.dtype), timesteps, index, self._cache)
        return flow[0]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
