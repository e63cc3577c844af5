"""Attention of a training sequence: teacher forcing, exactly as the KV window holds it when serving.

A sequence has eight chunks of one session. c is clean (timestep 0), n is noisy:

    place   0   1   2   3    4    5    6    7
    chunk  c0  n0  cm  cm+1 cm+2 nm+1 nm+2 nm+3

c0 is the sink. Each chunk from place 2 on attends to the sink, to the clean chunk before it (the rolling part
of a window of 9 latent frames) and to itself. If m is 0, place 2 repeats the sink, and no place may see both.

The first two places read the session's first prompt, the others the second one. After a prompt switch the
rolling context is therefore recached under the new prompt, and the sink keeps the old one (LongLive's global
sink), unless the switch comes so early that the sink is recached too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turboserve.worker.model.config import ModelConfig

PLACES = 8
CHUNK = 3


def turn(keys: Tensor, frames: Tensor, config: ModelConfig) -> Tensor:
    """Rotate keys to a later time. keys [..., heads, head_dim]; frames: long, broadcasts over keys' [...]."""
    pairs = config.head_dim // 2
    time_pairs = pairs - 2 * (pairs // 3)
    steps = torch.arange(0, 2 * time_pairs, 2, dtype=torch.float64, device=frames.device)
    exponents = steps / (2 * time_pairs)
    angles = frames.to(torch.float64).unsqueeze(-1) * config.rotation_theta**-exponents
    angles = F.pad(angles, (0, pairs - time_pairs)).unsqueeze(-2)
    cos, sin = angles.cos().float(), angles.sin().float()
    even, odd = keys.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class TrainingMemory:
    """`Memory` of one batch of sequences.

    Args:
        config: Configuration of the transformer.
        text: Per layer, keys and values of both prompts, [2·B, L, heads, head_dim], first prompts first.
        first_chunk: m of each sequence, long [B].
        sink_recached: Whether place 0 reads the second prompt, bool [B].
        sink_shift: Frames by which places 2 … 7 see the sink later than it was, long [B, 6].
    """

    def __init__(
        self,
        config: ModelConfig,
        text: list[tuple[Tensor, Tensor]],
        first_chunk: Tensor,
        sink_recached: Tensor,
        sink_shift: Tensor,
    ) -> None:
        self._config = config
        self._text = text
        self._recached = sink_recached.view(-1, 1, 1, 1)
        self._shift = sink_shift
        batch, tokens = len(first_chunk), CHUNK * config.tokens_per_frame
        starts = first_chunk == 0
        blocks = torch.ones(batch, PLACES - 2, 3, dtype=torch.bool)
        blocks[:, 0, 1] = False
        blocks[starts, 0, 0] = False
        blocks[starts, 1, 1] = False
        blocks[starts, 3, 1] = False
        self._mask = blocks.repeat_interleave(tokens, -1).view(batch * (PLACES - 2), 1, 1, -1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Memory`: q, k, v [B, 8 · chunk tokens, heads, head_dim]."""
        batch, length, heads, width = q.shape
        q, k, v = (x.view(batch, PLACES, length // PLACES, heads, width) for x in (q, k, v))
        alone = _attention(*(x[:, :2].flatten(0, 1) for x in (q, k, v))).unflatten(0, (batch, 2))
        sink_k = turn(k[:, :1], self._shift[:, :, None], self._config)
        sink_v = v[:, :1].expand(-1, PLACES - 2, -1, -1, -1)
        keys = torch.cat((sink_k, _before(k), k[:, 2:]), 2).flatten(0, 1)
        values = torch.cat((sink_v, _before(v), v[:, 2:]), 2).flatten(0, 1)
        rest = _attention(q[:, 2:].flatten(0, 1), keys, values, self._mask).unflatten(0, (batch, PLACES - 2))
        return torch.cat((alone, rest), 1).flatten(1, 2)

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        """See `Memory`."""
        k, v = self._text[layer]
        batch, place = len(q), q.shape[1] // PLACES
        sink_k, sink_v = (torch.where(self._recached, x[batch:], x[:batch]) for x in (k, v))
        sink = _attention(q[:, :place], sink_k, sink_v)
        first = _attention(q[:, place : 2 * place], k[:batch], v[:batch])
        second = _attention(q[:, 2 * place :], k[batch:], v[batch:])
        return torch.cat((sink, first, second), 1)


def _before(x: Tensor) -> Tensor:
    """Return the clean place before each of places 2 … 7. Slot 2 has none; its mask hides the stand-in."""
    return torch.cat((x[:, 2:3], x[:, 2:4], x[:, 2:5]), 1)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
