"""The text encoder of toyworld: encodes words as eight summary tokens.

A prompt is split into words. Known words have their own embedding, and unknown ones share hashed buckets. A
small transformer reads them together with eight learned queries, and the queries' outputs are the prompt's
embedding: one each for the shape, color and motion of two figures, the background and the number of figures.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turboserve.worker.model.toy_prompt import MAX_WORDS, split_words
from turboserve.worker.model.toy_steering import DIRECTIONS, SENTENCES, STEPS
from turboserve.worker.model.weights import weight_bytes

BUCKETS = 64
SUMMARY = ("shape1", "colour1", "motion1", "shape2", "colour2", "motion2", "background", "count")
"""The attribute that each summary token is trained to encode."""
STEERED = SUMMARY.index("motion1")
"""Token that steering replaces."""


class _TextLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class ToyText(nn.Module):
    """Encodes prompts as [B, 8, dim] with unit mean square per token.

    Args:
        vocabulary: Known words, in the order of their embeddings.
        dim: Width of the embedding, `text_dim` of the transformer.
    """

    def __init__(self, vocabulary: Sequence[str], dim: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.vocabulary = tuple(vocabulary)
        self._index = {word: 1 + BUCKETS + i for i, word in enumerate(self.vocabulary)}
        self.words = nn.Embedding(1 + BUCKETS + len(self.vocabulary), dim, padding_idx=0)
        self.places = nn.Parameter(0.02 * torch.randn(MAX_WORDS, dim))
        self.queries = nn.Parameter(0.2 * torch.randn(len(SUMMARY), dim))
        self.layers = nn.ModuleList(_TextLayer(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.steering = nn.Parameter(torch.zeros(len(DIRECTIONS), dim))

    @property
    def weight_bytes(self) -> int:
        """See `TextEncoder.weight_bytes`."""
        return weight_bytes(self)

    @property
    def workspace_bytes(self) -> int:
        """See `TextEncoder.workspace_bytes`. The feed-forward has the widest tensors."""
        dim = self.queries.shape[1]
        return 16 * (MAX_WORDS + len(SUMMARY)) * dim * self.queries.element_size()

    def tokenize(self, prompts: Sequence[str]) -> Tensor:
        """Word indices [B, longest], 0 where a prompt is shorter."""
        rows = [[self._token(word) for word in split_words(prompt)] for prompt in prompts]
        longest = max(1, *(len(row) for row in rows))
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows])

    def forward(self, tokens: Tensor) -> Tensor:
        """Word indices [B, n] → summary tokens [B, 8, dim]."""
        batch, count = tokens.shape
        x = self.words(tokens) + self.places[:count]
        x = torch.cat((self.queries.expand(batch, -1, -1), x), 1)
        seen = F.pad(tokens != 0, (len(SUMMARY), 0), value=True)
        for layer in self.layers:
            x = layer(x, seen[:, None, None, :])
        out: Tensor = self.norm(x[:, : len(SUMMARY)])
        return out

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Encode prompts as [B, 8, dim]."""
        embedded: Tensor = self(self.tokenize(prompts).to(self.queries.device))
        return embedded

    def steered(self, embedded: Tensor, direction: str) -> Tensor:
        """Replace the first figure's motion in embeddings [..., 8, dim] by a direction of `DIRECTIONS`.

        Returns a new tensor. Raises `ValueError` for an unknown direction.
        """
        if direction not in DIRECTIONS:
            raise ValueError(f"steer: {direction!r} is not one of {', '.join(DIRECTIONS)}")
        steered = embedded.clone()
        steered[..., STEERED, :] = self.steering[DIRECTIONS.index(direction)].detach()
        return steered

    @torch.no_grad()
    def words_as_steering(self) -> Tensor:
        """Return tokens [9, dim] for the directions made of the prompts' own: what training begins with."""
        tokens = self.encode(list(SENTENCES.values()))[:, STEERED]
        known = dict(zip(SENTENCES, tokens, strict=True))
        straight = {STEPS[name]: token for name, token in known.items()}
        rows = [
            known[name] if name in known else (straight[across, 0] + straight[0, down]) / 2**0.5
            for name, (across, down) in STEPS.items()
        ]
        return torch.stack(rows).clone()

    def _token(self, word: str) -> int:
        known = self._index.get(word)
        return known if known is not None else 1 + zlib.crc32(word.encode()) % BUCKETS
