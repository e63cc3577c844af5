"""From settings to an engine: the device, the models, and how many sessions' memory there is."""

from __future__ import annotations

import torch

from turboserve.worker.engine.budget import MemoryBudget
from turboserve.worker.engine.engine import Engine, Models
from turboserve.worker.engine.slab import SlabLayout
from turboserve.worker.engine.spec import EngineOptions
from turboserve.worker.settings import AUTO_SESSIONS, Settings

CPU_BYTES = 2 << 30
_FREE_SHARE = 0.9
_WORKSPACE_SHARE = 0.1


def choose_device(settings: Settings) -> torch.device:
    """The device that was asked for, or the best there is."""
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def load_models(settings: Settings) -> Models:
    """The configured model on the chosen device. Takes seconds; raises `CheckpointError` for bad weights."""
    from turboserve.worker.model.toyworld import load_toyworld

    device = choose_device(settings)
    if device.type == "cpu":
        torch.set_num_threads(settings.torch_threads)
    return load_toyworld(device, settings.model_weights)


def make_engine(models: Models, settings: Settings) -> Engine:
    """An engine with as many slabs as are wanted and fit. Raises `BudgetTooSmall` when none does."""
    weight = models.transformer.patch_embedding.weight
    layout = SlabLayout.of(models.transformer.config, weight.dtype)
    model_bytes = sum(p.numel() * p.element_size() for p in models.transformer.parameters())
    total = settings.memory_bytes or _free_bytes(weight.device) + model_bytes
    budget = MemoryBudget(
        total_bytes=total,
        model_bytes=model_bytes,
        workspace_bytes=round(_WORKSPACE_SHARE * total),
        slab_bytes=layout.total_bytes,
        decode_cache_bytes=models.decoder.cache_bytes,
    )
    slots = min(settings.worker_max_sessions or AUTO_SESSIONS, budget.sessions())
    options = EngineOptions(
        slab_bytes=slots * layout.total_bytes,
        host_bytes=settings.host_memory_bytes,
        max_lead_s=settings.max_lead_s,
        max_batch=slots,
        policy=settings.gather_policy,
    )
    return Engine(models, options)


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return round(_FREE_SHARE * free)
