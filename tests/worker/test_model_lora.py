"""LoRA weights in the public layouts, merged at load: equal to base plus adapter at run time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.load import CheckpointError
from turboserve.worker.model.lora import merge_lora, read_lora
from turboserve.worker.model.naming import DIFFUSERS_TRANSFORMER

RANK = 4


@pytest.fixture
def base(tiny_config: ModelConfig, make_models: Callable[..., Models]) -> dict[str, Tensor]:
    return dict(make_models(tiny_config).transformer.state_dict())


@pytest.fixture
def adapter(base: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `MODULE.lora_A` and `MODULE.lora_B` of every Linear of the blocks."""
    generator = torch.Generator().manual_seed(4)
    made = {}
    for name, weight in base.items():
        if name.startswith("blocks.") and weight.ndim == 2:
            module = name.removesuffix(".weight")
            made[f"{module}.lora_A"] = torch.randn(RANK, weight.shape[1], generator=generator)
            made[f"{module}.lora_B"] = torch.randn(weight.shape[0], RANK, generator=generator)
    return made


def test_every_linear_of_the_blocks_is_adapted(tiny_config: ModelConfig, adapter: dict[str, Tensor]) -> None:
    # q, k, v, o of both attentions, and two of the feed-forward.
    assert len(adapter) == 2 * 10 * tiny_config.num_layers


@pytest.mark.parametrize("alpha", [None, float(RANK), 2.0 * RANK])
def test_the_merged_layer_is_the_base_plus_the_scaled_adapter(
    base: dict[str, Tensor], adapter: dict[str, Tensor], alpha: float | None
) -> None:
    merged = merge_lora(base, adapter, alpha)
    assert merged.keys() == base.keys()
    scale = (alpha or RANK) / RANK
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(5))
    for module in ("blocks.0.self_attn.q", "blocks.1.cross_attn.o", "blocks.1.ffn.0"):
        down, up = adapter[f"{module}.lora_A"], adapter[f"{module}.lora_B"]
        bias = base[f"{module}.bias"]
        expected = F.linear(x, base[f"{module}.weight"], bias) + scale * F.linear(F.linear(x, down), up)
        assert torch.allclose(F.linear(x, merged[f"{module}.weight"], bias), expected, atol=1e-4)
    for name in ("blocks.0.self_attn.q.bias", "head.head.weight", "time_embedding.0.weight"):
        assert merged[name] is base[name]


def test_the_sum_is_rounded_once(base: dict[str, Tensor], adapter: dict[str, Tensor]) -> None:
    half = {name: tensor.to(torch.bfloat16) for name, tensor in base.items()}
    name = "blocks.0.ffn.2"
    exact = half[f"{name}.weight"].float() + adapter[f"{name}.lora_B"] @ adapter[f"{name}.lora_A"]
    assert torch.equal(merge_lora(half, adapter)[f"{name}.weight"], exact.to(torch.bfloat16))
    kept = merge_lora(half, adapter, dtype=torch.float32)[f"{name}.weight"]
    assert torch.allclose(kept, exact, atol=1e-6)


def test_public_layouts(tmp_path: Path, adapter: dict[str, Tensor]) -> None:
    peft = {f"base_model.model.{name}.weight": tensor for name, tensor in adapter.items()}
    named = {f"model.base_model.model.{name}.default.weight": tensor for name, tensor in adapter.items()}

    def diffusers(name: str) -> str:
        module, part = name.rsplit(".", 1)
        return f"{DIFFUSERS_TRANSFORMER.back(module)}.{part}.weight"

    torch.save({"generator_lora": peft, "critic_lora": {}, "step": 3}, tmp_path / "lora.pt")
    torch.save(peft, tmp_path / "raw.pt")
    torch.save(named, tmp_path / "named.pt")
    save_file({diffusers(name): tensor for name, tensor in adapter.items()}, tmp_path / "d.safetensors")
    for file in ("lora.pt", "raw.pt", "named.pt", "d.safetensors"):
        found = read_lora(tmp_path / file)
        assert found.keys() == adapter.keys(), file
        assert all(torch.equal(found[name], adapter[name]) for name in adapter)


def test_what_does_not_fit_is_listed(base: dict[str, Tensor], adapter: dict[str, Tensor]) -> None:
    bad = dict(adapter)
    del bad["blocks.1.ffn.0.lora_B"]
    bad["blocks.7.ffn.0.lora_A"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        merge_lora(base, bad)
    assert caught.value.missing == ["blocks.1.ffn.0.lora_B"]
    assert caught.value.extra == ["blocks.7.ffn.0.lora_A"]
    bad = {**adapter, "blocks.0.self_attn.q.lora_B": torch.zeros(48, RANK + 1)}
    with pytest.raises(CheckpointError) as caught:
        merge_lora(base, bad)
    assert caught.value.misshaped == [("blocks.0.self_attn.q.lora_B", (48, RANK + 1), (48, RANK))]
