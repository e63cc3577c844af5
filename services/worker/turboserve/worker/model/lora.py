"""Merge LoRA weights, as LongLive publishes them, into the base at load: W + (alpha / rank)·B·A."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from turboserve.worker.model.load import CheckpointError, read_checkpoint
from turboserve.worker.model.naming import DIFFUSERS_TRANSFORMER

_CONTAINER = "generator_lora"
_PEFT_PREFIX = "base_model.model."
_DOWN, _UP = "lora_A", "lora_B"


def read_lora(path: Path) -> dict[str, Tensor]:
    """Adapter tensors of a file that holds `generator_lora`, or PEFT's keys directly.

    Keys of the result are `MODULE.lora_A` [rank, in] and `MODULE.lora_B` [out, rank], with the worker's names
    of modules. Raises `UnreadableCheckpointError`.
    """
    found = read_checkpoint(path, known=(_CONTAINER,))
    return {_bare(name): tensor for name, tensor in found.items()}


def merge_lora(
    base: Mapping[str, Tensor],
    lora: Mapping[str, Tensor],
    alpha: float | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The base with every Linear layer of its blocks adapted; tensors without an adapter are the base's own.

    Each tensor is computed in float32 and rounded once to `dtype`, by default the base's. `alpha` None: equal
    to the rank, as LongLive trains it. Raises `CheckpointError` if an adapter is missing, extra or
    mis-shaped.
    """
    targets = {
        name.removesuffix(".weight"): weight for name, weight in base.items() if _adapted(name, weight)
    }
    needed = {f"{target}.{part}" for target in targets for part in (_DOWN, _UP)}
    missing, extra = sorted(needed - lora.keys()), sorted(lora.keys() - needed)
    misshaped = [] if missing or extra else _misshaped(targets, lora)
    if missing or extra or misshaped:
        raise CheckpointError(missing, extra, misshaped)
    merged = dict(base)
    for target, weight in targets.items():
        down, up = lora[f"{target}.{_DOWN}"].float(), lora[f"{target}.{_UP}"].float()
        scale = 1.0 if alpha is None else alpha / down.shape[0]
        sum_ = torch.addmm(weight.float(), up, down, alpha=scale)
        merged[f"{target}.weight"] = sum_.to(dtype or weight.dtype)
    return merged


def _adapted(name: str, weight: Tensor) -> bool:
    return name.startswith("blocks.") and name.endswith(".weight") and weight.ndim == 2


def _misshaped(
    targets: Mapping[str, Tensor], lora: Mapping[str, Tensor]
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    wrong: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for target, weight in sorted(targets.items()):
        rank = lora[f"{target}.{_DOWN}"].shape[0]
        for part, shape in ((_DOWN, (rank, weight.shape[1])), (_UP, (weight.shape[0], rank))):
            found = tuple(lora[f"{target}.{part}"].shape)
            if found != shape:
                wrong.append((f"{target}.{part}", found, shape))
    return wrong


def _bare(name: str) -> str:
    """`base_model.model.blocks.0.self_attn.q.lora_A.default.weight` → `blocks.0.self_attn.q.lora_A`."""
    bare = name.removeprefix(_PEFT_PREFIX).removesuffix(".weight").removesuffix(".default")
    module, dot, part = bare.rpartition(".")
    if part not in (_DOWN, _UP):
        return name
    return DIFFUSERS_TRANSFORMER.there(module) + dot + part
