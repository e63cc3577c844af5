"""The models that benchmarks run: the shipped one, and any other with random weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turboserve.bench.engine.measure import batches
from turboserve.worker.engine.interface import Decoder
from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.taehv import Taehv, TaehvConfig, TaehvDecoder
from turboserve.worker.model.transformer import CausalWanTransformer
from turboserve.worker.model.wan_vae import WanDecoder, WanVae
from turboserve.worker.model.wan_vae_config import WanVaeConfig
from turboserve.worker.replicas.toyworld import load_toyworld

PROMPT = "a red circle moving left on black"
SIZES = (1, 2, 4, 8, 16)
DecoderSizes = WanVaeConfig | TaehvConfig
PUBLIC_DECODERS: dict[str, DecoderSizes] = {"wan": WanVaeConfig(), "taehv": TaehvConfig()}


class FixedText:
    """Stands in for a text encoder, which is not part of the measurement."""

    weight_bytes = 0
    workspace_bytes = 0

    def __init__(self, embedding: Tensor) -> None:
        """`embedding` is the embedding of every prompt, [L, text_dim]."""
        self._embedding = embedding

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """See `TextEncoder.encode`."""
        return self._embedding.expand(len(prompts), -1, -1)


def toyworld() -> Models:
    """Load the shipped model on one thread of the CPU, as a worker runs it."""
    torch.set_num_threads(1)
    return load_toyworld()


def random_transformer(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> CausalWanTransformer:
    """Build a transformer of these sizes with fixed random weights; time does not depend on weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = CausalWanTransformer(config).to(dtype).requires_grad_(False).eval()
        torch.nn.init.normal_(model.head.head.weight, std=0.02)
    return model


def random_decoder(
    sizes: DecoderSizes, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Decoder:
    """Build a public decoder's network with random weights, for the latents of `config`."""
    height, width = config.latent_height, config.latent_width
    with torch.device(device):
        if isinstance(sizes, TaehvConfig):
            return TaehvDecoder(Taehv(sizes).to(dtype).eval(), height, width)
        return WanDecoder(WanVae(sizes).to(dtype).eval(), height, width)


def random_models(
    config: ModelConfig, sizes: DecoderSizes, device: torch.device, dtype: torch.dtype
) -> Models:
    """Build a transformer and a decoder with random weights, and a fixed text embedding."""
    transformer = random_transformer(config, device, dtype)
    text = torch.randn(config.text_len, config.text_dim, device=device)
    return Models(transformer, FixedText(text), random_decoder(sizes, config, device, dtype))


def toyworld_forward_profile(repeats: int = 7) -> dict[int, float]:
    """Measure the processor seconds of a forward by batch size, made to rise, as a profile must."""
    models = toyworld()
    with torch.inference_mode():
        text = models.text.encode([PROMPT])
    seconds: dict[int, float] = {}
    for size, found in batches(models.transformer, text, SIZES, repeats).items():
        seconds[size] = max([found.forward_s, *seconds.values()])
    return seconds
