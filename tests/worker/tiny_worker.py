"""A worker process with a tiny random model: everything is real but the picture. Tests start it."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Mapping, Sequence

import torch
from pydantic import JsonValue
from torch import Tensor

from turboserve import service
from turboserve.contracts.control_declarations import ControlDeclaration
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.state_transfer import Transfer
from turboserve.worker.engine.streams import DEVICE_LOST
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.transformer import CausalWanTransformer
from turboserve.worker.service.app import start
from turboserve.worker.settings import Settings

CONFIG = ModelConfig(
    dim=48,
    ffn_dim=96,
    num_heads=2,
    num_layers=2,
    text_dim=12,
    text_len=5,
    latent_height=4,
    latent_width=4,
    freq_dim=32,
    local_attn_size=9,
    sink_size=3,
    rotation="window",
)


class Text:
    """Encodes prompts as embeddings that depend on the prompt alone.

    The prompt `raise` fails, and `break` breaks the device as well.
    """

    weight_bytes = 0
    workspace_bytes = 0

    def encode(self, prompts: Sequence[str]) -> Tensor:
        return torch.stack([self._one(prompt) for prompt in prompts])

    def _one(self, prompt: str) -> Tensor:
        if prompt == "raise":
            raise RuntimeError("the text encoder fails for this prompt")
        if prompt == "break":
            raise DEVICE_LOST[0]("an illegal memory access was encountered")
        seed = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:6], "big")
        shape = (CONFIG.text_len - 1, CONFIG.text_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Controls:
    """One control, `steer`, which shifts the embeddings."""

    declarations = (
        ControlDeclaration(name="steer", description="Direction.", value_schema={"enum": ["left", "right"]}),
    )

    def __init__(self, text: Text) -> None:
        self._text = text

    def encode(self, prompts: Sequence[str], values: Sequence[Mapping[str, JsonValue]]) -> Tensor:
        shifts = [{"left": -1.0, "right": 1.0}.get(str(each.get("steer")), 0.0) for each in values]
        return self._text.encode(prompts) + torch.tensor(shifts)[:, None, None]


class Decoder:
    """Streaming decoder: each frame depends on all latents since the first, or since the cache was lost."""

    cache_bytes = 64
    weight_bytes = 0
    workspace_bytes = 1 << 16

    def decode(
        self, latents: Tensor, caches: Sequence[dict[str, Tensor]] | None
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        rows = [self._one(row, None if caches is None else caches[i]) for i, row in enumerate(latents)]
        return torch.stack([frames for frames, _ in rows]), [cache for _, cache in rows]

    def _one(self, latents: Tensor, cache: dict[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
        total = torch.zeros(latents.shape[1]) if cache is None else cache["total"]
        frames = []
        for number, latent in enumerate(latents):
            total = 0.5 * total + latent.mean((1, 2))
            level = (total[:3] * 100 + 128).clamp(0, 255).to(torch.uint8)
            frames += [level.expand(32, 32, 3)] * (1 if cache is None and number == 0 else 4)
        return torch.stack(frames), {"total": total}


def slow_copies(seconds: float) -> None:
    """Let each group of a state's copies take as long, and log its begin."""
    copy = Transfer._copy

    def copied(transfer: Transfer, copies: list[tuple[Tensor, Tensor]]) -> bool:
        print("copy begins", transfer.session, flush=True)
        time.sleep(seconds)
        return copy(transfer, copies)

    Transfer._copy = copied  # type: ignore[method-assign,assignment]


def tiny_models(settings: Settings) -> Models:
    torch.set_num_threads(1)
    if seconds := float(os.environ.get("TINY_WORKER_COPY_S", "0")):
        slow_copies(seconds)
    seed = os.environ.get("TINY_WORKER_SEED", "5")
    torch.manual_seed(int(seed))
    transformer = CausalWanTransformer(CONFIG)
    torch.nn.init.normal_(transformer.head.head.weight, std=0.2)
    transformer.requires_grad_(False).eval()
    text = Text()
    return Models(transformer, text, Decoder(), weights=seed, controls=Controls(text))


def main() -> None:
    service.run("worker", Settings(), functools.partial(start, load=tiny_models))


if __name__ == "__main__":
    main()
