"""The model `paced`: networks of a few bytes, of chunks of 1.5 s.

On a `PacedDevice` it stands for any model: latencies and state are the device's. It shows a gray picture,
whatever the prompt, so it does not keep the contract of models that show something.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.transformer import CausalWanTransformer
from turboserve.worker.model.weights import weights_digest
from turboserve.worker.replicas.models import ModelOptions

NAME = "paced"
CONFIG = ModelConfig(
    dim=24,
    ffn_dim=24,
    num_heads=1,
    num_layers=1,
    text_dim=4,
    text_len=4,
    latent_height=2,
    latent_width=2,
    freq_dim=8,
    local_attn_size=9,
    rotation="window",
    fps=8,
)
GRAY = 128


class _BlankText:
    """See `interface.TextEncoder`."""

    weight_bytes = 0
    workspace_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """See `TextEncoder.encode`."""
        return torch.zeros(len(prompts), CONFIG.text_len, CONFIG.text_dim, device=self._device)


class _GrayDecoder:
    """See `interface.Decoder`."""

    weight_bytes = 0
    workspace_bytes = 1 << 16
    cache_bytes = 8

    def decode(
        self, latents: Tensor, caches: Sequence[dict[str, Tensor]] | None
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """See `Decoder.decode`."""
        sessions, frames, _, height, width = latents.shape
        count = frames * CONFIG.frames_per_latent - (CONFIG.frames_per_latent - 1) * (caches is None)
        side = CONFIG.pixels_per_latent
        shape = (sessions, count, height * side, width * side, 3)
        shown = torch.full(shape, GRAY, dtype=torch.uint8, device=latents.device)
        return shown, [{"began": torch.ones(1, device=latents.device)} for _ in range(sessions)]


def load(options: ModelOptions) -> Models:
    """Build the model. See `replicas.models`."""
    torch.manual_seed(0)
    transformer = CausalWanTransformer(CONFIG)
    transformer.requires_grad_(False).eval().to(options.device, options.dtype)
    digest = weights_digest({"transformer": transformer})
    return Models(transformer, _BlankText(options.device), _GrayDecoder(), digest)
