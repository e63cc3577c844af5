"""The model `padded-toyworld`: the small toyworld with padding tensors: weights of any size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from turboserve.worker.engine.models import Models
from turboserve.worker.model.presets import SHIPPED
from turboserve.worker.model.weight_manifest import WeightManifest
from turboserve.worker.model.weights import manifest_of
from turboserve.worker.replicas.models import MissingFileError, ModelOptions
from turboserve.worker.replicas.toyworld import load_toyworld
from turboserve.worker.replicas.weight_filler import WeightFiller

NAME = "padded-toyworld"
BASE = "toyworld-small"
TENSOR_BYTES = 48 << 20
"""Bytes of a padding tensor: more than a shard has."""
PADDING = "padding"
"""Name of the network of padding tensors."""


def write_padding(file: Path, size: int, seed: int = 0) -> None:
    """Write padding tensors of `size` random bytes in all, as safetensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for number, begin in enumerate(range(0, size, TENSOR_BYTES)):
        count = min(TENSOR_BYTES, size - begin)
        words = torch.randint(-(2**62), 2**62, (-(-count // 8),), generator=generator)
        tensors[f"padding{number}"] = words.view(torch.uint8)[:count].clone()
    save_file(tensors, file)


@dataclass(frozen=True)
class _PaddingToo:
    """A filler of the base model's networks that fills the padding, too."""

    filler: WeightFiller
    padding: nn.Module

    def fill(self, networks: Mapping[str, nn.Module], details: str) -> WeightManifest:
        """See `WeightFiller.fill`."""
        return self.filler.fill({**networks, PADDING: self.padding}, details)


def load(options: ModelOptions) -> Models:
    """Build the model; `options.checkpoint` is the padding's file. Raises the errors of `load_toyworld`."""
    if options.checkpoint is None:
        raise MissingFileError(NAME, "checkpoint")
    padding = _read_padding(options.checkpoint, options.device, values=options.filler is None)
    filler = None if options.filler is None else _PaddingToo(options.filler, padding)
    models = load_toyworld(options.device, SHIPPED[BASE], filler)
    networks = {**models.networks, PADDING: padding}
    assert models.manifest is not None
    manifest = models.manifest if filler else manifest_of(networks, models.manifest.details)
    return replace(models, weights=manifest.digest, manifest=manifest, networks=networks)


def _read_padding(file: Path, device: torch.device, *, values: bool) -> nn.Module:
    """The padding tensors in memory of their own, not mapped. Without `values`, they are undefined."""
    padding = nn.Module()
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            if values:
                tensor = opened.get_tensor(name).clone()
            else:
                tensor = torch.empty(opened.get_slice(name).get_shape(), dtype=torch.uint8)
            padding.register_buffer(name, tensor.to(device))
    return padding
