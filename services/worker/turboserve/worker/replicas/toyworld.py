"""Load toyworld for the engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from turboserve.worker.engine.models import Models
from turboserve.worker.model.toy_control import SteerControl
from turboserve.worker.model.toyworld import ToyDecoder, read_toyworld
from turboserve.worker.model.weights import weights_digest


def load_toyworld(device: torch.device | str = "cpu", path: Path | None = None) -> Models:
    """Load the engine's models on `device`. Raises the errors of `read_toyworld`."""
    world = read_toyworld(path)
    networks: dict[str, nn.Module] = {"transformer": world.transformer, "vae": world.vae, "text": world.text}
    for network in networks.values():
        network.to(device)
    # The digest includes the vocabulary: the encoder identifies words by their place in it.
    digest = weights_digest(networks, json.dumps(world.details["vocabulary"]))
    steer = SteerControl(world.text, world.directions)
    return Models(world.transformer, world.text, ToyDecoder(world.vae, world.config), digest, steer)
