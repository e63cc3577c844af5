"""How a model's function gets weights that other workers send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn

    from turboserve.worker.model.weight_manifest import WeightManifest


class WeightsUnavailableError(RuntimeError):
    """No other worker has sent the weights. The model's files have them."""


class WeightFiller(Protocol):
    """Brings weights from elsewhere than a model's files."""

    def fill(self, networks: Mapping[str, nn.Module], details: str) -> WeightManifest:
        """Overwrite the weights of networks that have their shapes, types and device. Blocks.

        `details`: as for `manifest_of`. Returns the manifest of the weights, each byte of which is verified.
        Raises `WeightsUnavailableError`: the weights are then undefined.
        """
        ...
