"""Checkpoints: containers and prefixes of public files, strictness."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.load import (
    CheckpointError,
    UnreadableCheckpointError,
    load_state,
    read_checkpoint,
)
from turboserve.worker.model.transformer import CausalWanTransformer


@pytest.fixture
def weights(tiny_config: ModelConfig, make_models: Callable[..., Models]) -> dict[str, Tensor]:
    return dict(make_models(tiny_config).transformer.state_dict())


def loaded(config: ModelConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = CausalWanTransformer(config)
    load_state(model, state)
    return dict(model.state_dict())


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_public_files_containers_and_prefixes(
    tmp_path: Path, tiny_config: ModelConfig, weights: dict[str, Tensor]
) -> None:
    wrapped = {f"model._fsdp_wrapped_module.{name}": tensor for name, tensor in weights.items()}
    other = {f"model.{name}": tensor + 1 for name, tensor in weights.items()}
    torch.save({"generator": other, "generator_ema": wrapped}, tmp_path / "self_forcing.pt")
    torch.save({"model": wrapped}, tmp_path / "longlive.pt")
    torch.save(weights, tmp_path / "bare.pt")
    save_file(wrapped, tmp_path / "flat.safetensors")
    for name in ("self_forcing.pt", "longlive.pt", "bare.pt", "flat.safetensors"):
        assert same(loaded(tiny_config, read_checkpoint(tmp_path / name)), weights)
    raw = read_checkpoint(tmp_path / "self_forcing.pt", "generator")
    assert torch.equal(raw["head.modulation"], weights["head.modulation"] + 1)
    with pytest.raises(UnreadableCheckpointError, match="no critic, but generator"):
        read_checkpoint(tmp_path / "self_forcing.pt", "critic")


def test_everything_that_does_not_fit_is_listed(tiny_config: ModelConfig, weights: dict[str, Tensor]) -> None:
    bad = dict(weights)
    del bad["blocks.0.norm3.bias"], bad["head.head.bias"]
    bad["blocks.9.extra"] = torch.zeros(1)
    bad["time_projection.1.bias"] = torch.zeros(7)
    model = CausalWanTransformer(tiny_config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_state(model, bad)
    assert caught.value.missing == ["blocks.0.norm3.bias", "head.head.bias"]
    assert caught.value.extra == ["blocks.9.extra"]
    assert caught.value.misshaped == [("time_projection.1.bias", (7,), (288,))]
    for text in ("2 missing", "1 extra: blocks.9.extra", "(7,) instead of (288,)"):
        assert text in str(caught.value)
    assert same(dict(model.state_dict()), before)
    with pytest.raises(CheckpointError) as caught:
        load_state(model, {})
    assert all(name in str(caught.value) for name in before)


def test_files_that_hold_no_state_dict(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"generator": {"a": 1}}, tmp_path / "numbers.pt")
    (tmp_path / "noise.pt").write_bytes(b"not a checkpoint")
    (tmp_path / "noise.safetensors").write_bytes(b"not a checkpoint")
    for name in ("list.pt", "numbers.pt", "noise.pt", "noise.safetensors"):
        with pytest.raises(UnreadableCheckpointError, match=name):
            read_checkpoint(tmp_path / name)
