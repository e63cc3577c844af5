"""A filler of weights without a network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from turboserve.worker.engine.models import Models
from turboserve.worker.model.weight_manifest import WeightManifest
from turboserve.worker.model.weights import named_weights


class Copied:
    """A filler that copies the weights of a loaded model."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def fill(self, networks: Mapping[str, nn.Module], details: str) -> WeightManifest:
        assert self.models.manifest is not None
        assert details == self.models.manifest.details
        theirs, ours = named_weights(self.models.networks), named_weights(networks)
        assert {name: tensor.shape for name, tensor in theirs.items()} == {
            name: tensor.shape for name, tensor in ours.items()
        }
        with torch.no_grad():
            for name, tensor in ours.items():
                tensor.copy_(theirs[name])
        return self.models.manifest
