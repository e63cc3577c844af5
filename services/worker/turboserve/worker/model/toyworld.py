"""toyworld, the trained model that ships with the worker: one weights file, three networks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.load import UnreadableCheckpointError, load_state
from turboserve.worker.model.streaming import Cache, keep, stacked
from turboserve.worker.model.toy_steering import DIRECTIONS, SENTENCES
from turboserve.worker.model.toy_text import ToyText
from turboserve.worker.model.toy_vae import ToyVae
from turboserve.worker.model.transformer import CausalWanTransformer
from turboserve.worker.model.weights import weight_bytes

WEIGHTS = Path(__file__).parent.parent / "weights" / "toyworld.safetensors"

DECODED_FRAMES = 3
"""Latent frames decoded at once. A rebuilt session decodes its whole window, which would take much memory."""
PARTS = ("transformer", "vae", "text")
"""Prefixes of the tensors in the weights file."""


@dataclass(frozen=True, eq=False)
class ToyWorld:
    """The three networks, in float32 on the CPU unless moved, and the weights file's metadata."""

    transformer: CausalWanTransformer
    vae: ToyVae
    text: ToyText
    details: Mapping[str, Any]
    """Sizes, vocabulary and provenance, as written by the export script."""
    directions: tuple[str, ...]
    """Values of the control `steer` that the weights take: the straight ones until steering is trained."""

    @property
    def config(self) -> ModelConfig:
        """The transformer's configuration."""
        return self.transformer.config

    @property
    def parameters(self) -> int:
        """Number of parameters of all three networks."""
        networks = (self.transformer, self.vae, self.text)
        return sum(p.numel() for network in networks for p in network.parameters())


class ToyDecoder:
    """The engine's `Decoder` over the VAE."""

    def __init__(self, vae: ToyVae, config: ModelConfig) -> None:
        self._vae = vae
        cells = config.latent_height * config.latent_width
        size = vae.latent_mean.element_size()
        self.cache_bytes = vae.cache_numbers(cells) * size
        """Bytes of one session's cache."""
        self.weight_bytes = weight_bytes(vae)
        """See `Decoder.weight_bytes`."""
        self.workspace_bytes = vae.workspace_numbers(DECODED_FRAMES, cells) * size
        """See `Decoder.workspace_bytes`."""

    @torch.inference_mode()
    def decode(self, latents: Tensor, caches: Sequence[Cache] | None) -> tuple[Tensor, list[Cache]]:
        """See `Decoder.decode`."""
        joined = None if caches is None else {name: stacked(caches, name) for name in caches[0]}
        made: list[Tensor] = []
        for part in latents.to(self._vae.latent_mean.dtype).split(DECODED_FRAMES, 1):
            frames, joined = self._vae.decode(part, joined)
            pixels = (frames.movedim(2, -1) + 1.0) * 127.5
            made.append(pixels.round().clamp(0, 255).to(torch.uint8))
        after: list[Cache] = [{} for _ in latents]
        for name, parts in (joined or {}).items():
            keep(after, name, parts)
        return torch.cat(made, 1), after


def read_toyworld(path: Path | None = None, *, values: bool = True) -> ToyWorld:
    """Read a weights file, by default the shipped one. Without `values`, the weights are left undefined.

    Raises `UnreadableCheckpointError`, `CheckpointError`.
    """
    path = path or WEIGHTS
    state: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part, _, rest = name.partition(".")
                if part not in state:
                    raise UnreadableCheckpointError(
                        f"{path}: tensor {name} begins with none of {', '.join(PARTS)}"
                    )
                if values:
                    state[part][rest] = file.get_tensor(name).float()
                else:
                    state[part][rest] = torch.empty(file.get_slice(name).get_shape())
        details = json.loads(metadata["config"])
        transformer = CausalWanTransformer(ModelConfig.from_mapping(details["transformer"]))
        vae = ToyVae(**details["vae"])
        text = ToyText(details["vocabulary"], details["transformer"]["text_dim"])
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise UnreadableCheckpointError(f"{path}: {error!r}") from error
    networks: dict[str, nn.Module] = {"transformer": transformer, "vae": vae, "text": text}
    untrained = text.steering.detach()
    steers = "steering" in state["text"]
    state["text"].setdefault("steering", untrained)
    for part, network in networks.items():
        load_state(network, state[part])
    if not steers:
        # A file from before steering was trained.
        text.steering.copy_(text.words_as_steering())
    return ToyWorld(transformer, vae, text, details, DIRECTIONS if steers else tuple(SENTENCES))
