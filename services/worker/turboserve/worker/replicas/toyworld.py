"""Load toyworld for the engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from turboserve.worker.engine.models import Models
from turboserve.worker.model.toy_control import SteerControl
from turboserve.worker.model.toyworld import ToyDecoder, read_toyworld
from turboserve.worker.model.weights import manifest_of
from turboserve.worker.replicas.weight_filler import WeightFiller


def load_toyworld(
    device: torch.device | str = "cpu", path: Path | None = None, filler: WeightFiller | None = None
) -> Models:
    """Load the engine's models on `device`. Raises the errors of `read_toyworld`.

    With a `filler`, the file is read for its metadata only. Raises the errors of `WeightFiller.fill`.
    """
    world = read_toyworld(path, values=filler is None)
    networks: dict[str, nn.Module] = {"transformer": world.transformer, "vae": world.vae, "text": world.text}
    for network in networks.values():
        network.to(device)
    # The digest includes the vocabulary: the encoder identifies words by their place in it.
    details = json.dumps(world.details["vocabulary"])
    manifest = manifest_of(networks, details) if filler is None else filler.fill(networks, details)
    steer = SteerControl(world.text, world.directions)
    decoder = ToyDecoder(world.vae, world.config)
    return Models(world.transformer, world.text, decoder, manifest.digest, steer, manifest, networks)
