"""Time of the digest of weights, from the memory of a device."""

from __future__ import annotations

import time
from typing import Any

import torch

from turboserve.worker.model.weights import HASHERS, weight_bytes, weights_digest

LAYERS = 8
REPEATS = 3


def digest_seconds(device: torch.device, width: int) -> dict[str, Any]:
    """Hash `LAYERS` square matrices in bfloat16. Seconds are the least of `REPEATS` runs.

    `same_on_the_host`: whether the digest is that of the same weights in the host's memory.
    """
    made = [torch.nn.Linear(width, width, False, device, torch.bfloat16) for _ in range(LAYERS)]
    network = torch.nn.ModuleList(made)
    wall_s, processor_s = [], []
    for _ in range(REPEATS):
        wall, processor = time.perf_counter(), time.process_time()
        digest = weights_digest({"network": network})
        wall_s.append(time.perf_counter() - wall)
        processor_s.append(time.process_time() - processor)
    return {
        "bytes": weight_bytes(network),
        "threads": HASHERS,
        "seconds": min(wall_s),
        "processor_s": min(processor_s),
        "same_on_the_host": weights_digest({"network": network.cpu()}) == digest,
    }
