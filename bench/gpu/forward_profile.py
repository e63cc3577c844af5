"""Where the time of one forward goes on a GPU, kernel by kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from turboserve.bench.engine.measure import WARM_UP, Sessions
from turboserve.worker.engine.work import ChunkWork
from turboserve.worker.model.schedule import Schedule
from turboserve.worker.model.transformer import CausalWanTransformer

FORWARDS = 3
LISTED = 30
NAME_LENGTH = 120


def forward_profile(
    model: CausalWanTransformer, text: torch.Tensor, attention: str, compiler: str | None
) -> dict[str, Any]:
    """Profile a forward of one session with a full window.

    Returns the device's milliseconds of a forward, and of the kernels that take the most: name → milliseconds
    and calls of a forward.
    """
    config = model.config
    sessions = Sessions(model, 1, text, attention=attention, compiler=compiler)
    sessions.fill()
    work = ChunkWork(sessions.states[0], config, Schedule(config))
    with torch.inference_mode():
        for _ in range(WARM_UP):
            sessions.forward([work.row()])
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            for _ in range(FORWARDS):
                sessions.forward([work.row()])
            torch.cuda.synchronize()
    kernels = [each for each in found.key_averages() if each.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda each: -each.self_device_time_total)
    return {
        "device_ms": sum(each.self_device_time_total for each in kernels) / FORWARDS / 1e3,
        "kernels": {
            each.key[:NAME_LENGTH]: {
                "ms": each.self_device_time_total / FORWARDS / 1e3,
                "calls": each.count / FORWARDS,
            }
            for each in kernels[:LISTED]
        },
    }
